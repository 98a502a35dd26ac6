"""The Triton kernels, one per file. Importing one needs the `triton` extra."""
