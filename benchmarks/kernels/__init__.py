"""Kernels of one GPU: attention, selection, and tuning."""
