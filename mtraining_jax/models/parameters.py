"""A model's parameters as a table of shapes, axis names and initial values.

Initialization, sharding, FLOPs and memory all follow from it. Does not import JAX.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Self

LAYERS = "layers."  # name prefix of layer parameters


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter, fp32. Layer parameters are stacked on a leading axis.

    Attributes:
        axes: name of each axis, for sharding; see `sharding.FSDP_AXES`.
        stddev: standard deviation of the normal initialization; None sets all entries to `value`.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    stddev: float | None = None
    value: float = 0.0

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def stacked(self, layers: int) -> Self:
        return dataclasses.replace(self, shape=(layers, *self.shape), axes=("layers", *self.axes))


ParamTable = Mapping[str, Parameter]


def subtable(table: ParamTable, prefix: str) -> dict[str, Parameter]:
    """The parameters below a prefix such as "mlp", without it in their names."""
    start = f"{prefix}."
    return {name.removeprefix(start): x for name, x in table.items() if name.startswith(start)}


def layer_params(table: ParamTable) -> dict[str, Parameter]:
    """The parameters of one layer by their name in it, e.g. "mlp.up_proj.weight"."""
    layers = subtable(table, LAYERS.removesuffix("."))
    return {
        name: dataclasses.replace(x, shape=x.shape[1:], axes=x.axes[1:])
        for name, x in layers.items()
    }


def matrix(rows: int, columns: int, axes: tuple[str, str], stddev: float) -> Parameter:
    """A matrix [out, in] with normal initialization."""
    return Parameter((rows, columns), axes, stddev=stddev)


def vector(size: int, value: float) -> Parameter:
    """A vector of equal entries."""
    return Parameter((size,), ("vector",), value=value)
