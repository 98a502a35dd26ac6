"""A model's parameters as a table: shape, names of axes and initial values of each.

Everything that depends on shapes follows from it: what the decoder draws, where parameters live,
FLOPs and memory. Imports no JAX.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Self

LAYERS = "layers."  # what names of the layers' parameters begin with


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter, fp32.

    Attributes:
        shape: of the whole array. Parameters of the layers are stacked on a leading axis.
        axes: name of each axis, which decides where it may be cut; see `sharding.FSDP_AXES`.
        stddev: standard deviation of the initial normal values; None sets all entries to `value`.
        value: see `stddev`.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    stddev: float | None = None
    value: float = 0.0

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    def stacked(self, layers: int) -> Self:
        """That of all layers together."""
        return dataclasses.replace(
            self, shape=(layers, *self.shape), axes=("layers", *self.axes)
        )

    def of_layer(self) -> Self:
        """That of one layer: the inverse of `stacked`."""
        return dataclasses.replace(self, shape=self.shape[1:], axes=self.axes[1:])


Table = Mapping[str, Parameter]


def under(table: Table, prefix: str) -> dict[str, Parameter]:
    """The parameters whose names begin with `prefix` and a dot, by the rest of their names."""
    start = f"{prefix}."
    return {
        name.removeprefix(start): parameter
        for name, parameter in table.items()
        if name.startswith(start)
    }


def one_layer(table: Table) -> dict[str, Parameter]:
    """The parameters of one layer, by their names in it, e.g. "mlp.up_proj.weight"."""
    layers = under(table, LAYERS.removesuffix("."))
    return {name: parameter.of_layer() for name, parameter in layers.items()}


def matrix(rows: int, columns: int, axes: tuple[str, str], stddev: float) -> Parameter:
    """A matrix [out, in], drawn from a normal distribution."""
    return Parameter((rows, columns), axes, stddev=stddev)


def vector(size: int, value: float) -> Parameter:
    """A vector of equal entries."""
    return Parameter((size,), ("vector",), value=value)
