"""Faults of other sparse backward passes, tried on the Hopper kernels (docs/gradients.md)."""

from tests.pallas_kernels.helpers.known_faults import KnownFaults
from tests.pallas_kernels.mosaic_gpu.hopper_backends import registered


class TestTwoBackwardKernels(KnownFaults):
    backend = registered("mosaic_gpu, two backward kernels", one_backward_kernel=False)


class TestFusedBackwardKernel(KnownFaults):
    backend = registered("mosaic_gpu, one backward kernel", one_backward_kernel=True)
