"""Kernels for GPUs older than Hopper, written in Triton and called with jax-triton.

Only `kernels` imports Triton, when a kernel is first called: it needs the `ampere` extra.
"""
