"""GPUMix: what a training plan does on a (mixed) GPU cluster."""
