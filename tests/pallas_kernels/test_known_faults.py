"""Faults of other sparse backward passes, on the CPU; `tests/gpu` runs them on a Hopper GPU."""

from tests.pallas_kernels.helpers.known_faults import KnownFaults


class TestXla(KnownFaults):
    backend = "xla"
    dtype = "float32"
    block_size = 16
    dims = (16,)
    repetitions = 3
