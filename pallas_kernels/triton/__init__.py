"""Kernels for GPUs older than Hopper; `kernels` needs the `ampere` extra when first called."""
