"""The lists that Hopper kernels walk: which thread block does what, and in which order."""
