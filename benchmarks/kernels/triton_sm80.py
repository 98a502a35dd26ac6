"""Backend `triton_sm80`: the Triton kernels with the code of an A100, on a later GPU.

The assembler of a GPU accepts PTX for an earlier one. So the very instructions of an A100 (warp
products with both operands in registers, asynchronous copies of 16 bytes) can run on a Hopper GPU.
Their speed, clocks, memory and caches differ there.
"""

import functools
from typing import Any

from pallas_kernels import backends
from pallas_kernels.triton import device
from pallas_kernels.triton.backend import Triton
from pallas_kernels.triton.call import run_on_gpu

NAME = "triton_sm80"
_AMPERE = 80
_CAPABILITY = 6  # position in the arguments of jaxlib's TritonKernel


def register() -> str:
    """Registers the backend, selected by name only, and returns the name; needs `triton`."""
    from jax_triton import triton_lib

    if not isinstance(triton_lib.triton_kernel_call_lib, _ForThisGpu):
        triton_lib.triton_kernel_call_lib = _ForThisGpu(triton_lib.triton_kernel_call_lib)
    run = functools.partial(run_on_gpu, capability=_AMPERE)
    backends.register(Triton(NAME, run=run, capability=_AMPERE))
    return NAME


class _ForThisGpu:
    """The library of jaxlib for Triton kernels; assembles sm_80 code for the GPU of this host."""

    def __init__(self, library: Any):
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def TritonKernel(self, *args: Any) -> Any:  # noqa: N802
        if args[_CAPABILITY] == _AMPERE:
            args = *args[:_CAPABILITY], device.capability(), *args[_CAPABILITY + 1 :]
        return self._library.TritonKernel(*args)
