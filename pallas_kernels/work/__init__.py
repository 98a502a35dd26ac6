"""Work lists of GPU kernels: the assignment of work to thread blocks, and its order."""
