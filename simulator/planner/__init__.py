"""Search for good plans: sweeps, grids and the optimisers."""
