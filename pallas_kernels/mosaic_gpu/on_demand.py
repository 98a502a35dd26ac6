"""Lazy import of the Hopper backend: importing Pallas Mosaic GPU takes seconds."""

import functools
from typing import Any

from pallas_kernels.checks import Shaped, unsupported_operands
from pallas_kernels.mosaic_gpu import device


class MosaicGpuOnDemand:
    """`MosaicGpu()`, imported by the first call that runs on a Hopper GPU."""

    name = "mosaic_gpu"

    def unsupported(self, q: Shaped, block_size: int | None) -> str | None:
        return device.no_hopper_gpu() or unsupported_operands(q, block_size)

    def __getattr__(self, name: str) -> Any:
        return getattr(_imported(), name)


@functools.cache
def _imported() -> Any:
    from pallas_kernels.mosaic_gpu.backend import MosaicGpu

    return MosaicGpu()
