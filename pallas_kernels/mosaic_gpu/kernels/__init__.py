"""The Hopper kernels, one a file."""
