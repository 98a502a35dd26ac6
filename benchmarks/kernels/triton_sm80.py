"""The Triton kernels with the code that an A100 runs, on a later GPU.

A GPU's assembler takes PTX that was written for an earlier one. So the very instructions of an A100
(products of warps with both operands in registers, asynchronous copies of 16 bytes) can run on a
Hopper GPU. What differs there: how fast they are, clocks, memory and caches.
"""

import functools
from typing import Any

from pallas_kernels import backends
from pallas_kernels.triton import device
from pallas_kernels.triton.backend import Triton
from pallas_kernels.triton.call import run_on_gpu

NAME = "triton_sm80"
_AMPERE = 80
_CAPABILITY = 6  # of the arguments of jaxlib's TritonKernel


def register() -> str:
    """Makes the backend known, by name only; its name. Needs the extra `ampere`."""
    from jax_triton import triton_lib

    if not isinstance(triton_lib.triton_kernel_call_lib, _ForThisGpu):
        triton_lib.triton_kernel_call_lib = _ForThisGpu(triton_lib.triton_kernel_call_lib)
    run = functools.partial(run_on_gpu, capability=_AMPERE)
    backends.register(Triton(NAME, run=run, capability=_AMPERE), by_name_only=True)
    return NAME


class _ForThisGpu:
    """jaxlib's library for Triton kernels, which assembles those for sm_80 for the GPU here."""

    def __init__(self, library: Any):
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def TritonKernel(self, *args: Any) -> Any:  # noqa: N802
        """As jaxlib's, with the capability of the GPU that is compiled for."""
        if args[_CAPABILITY] == _AMPERE:
            args = *args[:_CAPABILITY], device.capability(), *args[_CAPABILITY + 1 :]
        return self._library.TritonKernel(*args)
