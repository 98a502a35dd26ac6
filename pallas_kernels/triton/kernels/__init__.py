"""The Triton kernels, one file each. Importing one needs the extra `ampere`."""
