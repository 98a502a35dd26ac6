"""Hopper backends used by tests: both kinds of backward kernels, on a GPU or interpreted."""

from typing import Any

from pallas_kernels import backends
from pallas_kernels.mosaic_gpu.backend import MosaicGpu


def registered(name: str, **options: Any) -> str:
    """Registers a Hopper backend with options of `MosaicGpu`, by name only; returns the name."""
    backends.register(MosaicGpu(name, **options))
    return name
