"""The lists that GPU kernels walk: which thread block does what, and in which order."""
