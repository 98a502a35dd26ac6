"""Kernels for NVIDIA GPUs other than Hopper; `kernels` needs the extra `triton`."""
