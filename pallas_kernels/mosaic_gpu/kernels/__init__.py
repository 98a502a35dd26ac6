"""The Hopper kernels, one per file."""
