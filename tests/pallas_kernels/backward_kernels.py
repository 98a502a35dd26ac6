"""The Hopper backward kernels, one or two of them, whatever the backend would choose."""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

from pallas_kernels import DiagonalTiles, SegmentedDiagonals
from pallas_kernels.gradients import Gradients
from pallas_kernels.mosaic_gpu import backend
from pallas_kernels.mosaic_gpu.configs import configs_for


def one_kernel(q, k, v, dout, lse, delta, tiles, verticals, **options: Any) -> Gradients:
    """Diagonals are marked as dense, whatever their lists say."""
    if isinstance(tiles, DiagonalTiles | SegmentedDiagonals):
        tiles = dataclasses.replace(tiles, dense=True)
    return backend.backward(q, k, v, dout, lse, delta, tiles, verticals, **options)


def two_kernels(q, *args, **options: Any) -> Gradients:
    """One for dq, one for dk and dv."""
    configs = dataclasses.replace(configs_for(q.shape[-1]), fused=None)
    return backend.backward(q, *args, **options, configs=configs)


def backend_with(backward: Callable[..., Gradients], **options: Any) -> types.SimpleNamespace:
    """The Hopper backend with another backward function; every call gets the options."""
    functions = dict(forward=backend.forward, backward=backward, delta_of=backend.delta_of)
    return types.SimpleNamespace(
        **{name: functools.partial(f, **options) for name, f in functions.items()}
    )
