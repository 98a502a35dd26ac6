"""Kernels for GPUs without Hopper's instructions, written in Triton and called by jax-triton.

Only `kernels` imports Triton, when a kernel is first called: it comes with the extra `ampere`.
"""
