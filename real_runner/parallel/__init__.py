"""Ways to spread a model over ranks: GPUMix's uneven data parallelism and torch's own."""
