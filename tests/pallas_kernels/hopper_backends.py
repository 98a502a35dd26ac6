"""Hopper backends that tests name: both kinds of backward kernels, on a GPU or interpreted."""

from typing import Any

from pallas_kernels import backends
from pallas_kernels.mosaic_gpu.backend import MosaicGpu


def registered(name: str, **options: Any) -> str:
    """Registers a Hopper backend with options of `MosaicGpu`, chosen by name only; the name."""
    backends.register(MosaicGpu(name, **options), by_name_only=True)
    return name
