"""The interface of every kind of tiles, and the checks that kinds share."""

import abc

import numpy as np
from jax import Array

NO_DIAGONAL = np.int32(np.iinfo(np.int32).min)


class Tiles(abc.ABC):
    """Which (query block, key block) tiles one kernel call computes.

    Blocks are numbered within the queries and the keys of the call. For each query block there is
    a range of list entries, for each key block another one: a kernel walks one or the other. The
    tile of query block i and key block j has the offset i - j. A tile whose offset is `diagonal`
    lies on the causal diagonal and is masked by element (row >= column); every other one is
    computed whole. Where a block's range holds a masked tile, it is the
    first entry of the range; of a query block's own list (`listed`) it is the last.

    A kind is a frozen dataclass, registered as a pytree.

    Attributes:
        diagonal: int32 [], the masked offset, or `NO_DIAGONAL`.
        block_size: g (static).
        listed: whether entries are block numbers, int32 [B, Hq, n, M] for n own blocks; else they
            are offsets, int32 [B, Hq, M], the same for all own blocks (static).
        dense: whether all tiles are computed that causality, and documents if there are any, allow
            (static). A kernel may be chosen by it; what is computed is what the lists say.
        num_segments: segments of equal length, one after another, that the keys are made of, and
            of which query blocks walk one at a time (static).
    """

    diagonal: Array
    block_size: int
    listed: bool
    dense: bool
    num_segments: int

    @property
    @abc.abstractmethod
    def row_entries(self) -> Array:
        """The lists that query blocks walk."""

    @property
    @abc.abstractmethod
    def column_entries(self) -> Array:
        """The lists that key blocks walk."""

    @abc.abstractmethod
    def row_ranges(self, num_query_blocks: int, num_key_blocks: int) -> tuple[Array, Array]:
        """For each query block, its range of `row_entries`.

        Returns:
            first, last: int32 [B, Hq, num_query_blocks], or [B, Hq, R, num_query_blocks] where a
            query block walks R ranges, one after another; entries first..last-1 apply.
        """

    @abc.abstractmethod
    def column_ranges(self, num_query_blocks: int, num_key_blocks: int) -> tuple[Array, Array]:
        """For each key block, its range of `column_entries`.

        Returns:
            first, last: int32 [B, Hq, num_key_blocks]; entries first..last-1 apply.
        """

    @abc.abstractmethod
    def check(self, batch: int, heads: int, num_query_blocks: int, num_key_blocks: int) -> None:
        """Raises ValueError, naming the field, unless the shapes suit a call."""


def check_shape(name: str, x: Array, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless `x` has that shape."""
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}: {shape} is needed")


def check_lists(name: str, x: Array, leading: tuple[int, ...]) -> None:
    """Raises ValueError unless `x` has shape [*leading, at least one]."""
    if x.shape[:-1] != leading or x.shape[-1] == 0:
        raise ValueError(
            f"{name} has shape {x.shape}: [{', '.join(map(str, leading))}, ...] with at least one "
            "entry in each list is needed"
        )
