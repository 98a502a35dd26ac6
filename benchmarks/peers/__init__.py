"""Attention kernels of other projects and those of this one, on the same lists in one run."""
