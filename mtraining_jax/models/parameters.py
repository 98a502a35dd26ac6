"""A model's parameters as a table of shapes, axis names and initial values, without JAX."""

import dataclasses
import math
from collections.abc import Callable, Mapping

LAYERS = "layers."  # name prefix of layer parameters


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter. Layer parameters are stacked on a leading axis.

    Attributes:
        axes: name of each axis, for sharding; see `sharding.FSDP_AXES`.
        stddev: standard deviation of a normal initialization.
        limit: limit of a uniform initialization around 0.
        value: all entries, if both are None.
        dtype: that of the stored values; only a frozen parameter is not fp32.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    stddev: float | None = None
    value: float = 0.0
    limit: float | None = None
    dtype: str = "float32"

    @property
    def size(self) -> int:
        return math.prod(self.shape)


ParamTable = Mapping[str, Parameter]


def with_frozen(table: ParamTable, dtype: str, trained: Callable[[str], bool]) -> ParamTable:
    """Stores matrices in `dtype`, except for `trained` names. Vectors are small and stay fp32."""
    return {
        name: x if "vector" in x.axes or trained(name) else dataclasses.replace(x, dtype=dtype)
        for name, x in table.items()
    }


def matrix(rows: int, columns: int, axes: tuple[str, str], stddev: float) -> Parameter:
    """A matrix [out, in] with normal initialization."""
    return Parameter((rows, columns), axes, stddev=stddev)


def vector(size: int, value: float) -> Parameter:
    """A vector of equal entries."""
    return Parameter((size,), ("vector",), value=value)
