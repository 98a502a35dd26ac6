"""The interface of all tiles, and common checks."""

import abc

import jax.numpy as jnp
import numpy as np
from jax import Array

NO_DIAGONAL = np.int32(np.iinfo(np.int32).min)

Lists = tuple[Array, Array, Array]


class Tiles(abc.ABC):
    """The (query block, key block) tiles that one kernel call computes.

    Blocks are numbered within the call. Tiles with offset i - j == `diagonal` are on the causal
    diagonal and masked per element (row >= column); all others are computed in full. A masked tile
    is the first entry of a block's range, or the last in a query block's own list (`listed`).
    Subclasses are frozen dataclasses, registered as pytrees.
    """

    diagonal: Array  # int32 [], the masked offset, or `NO_DIAGONAL`
    block_size: int  # g (static)
    # Whether entries are block numbers, int32 [B, Hq, n, M] for n own blocks (static). Otherwise
    # they are offsets, int32 [B, Hq, M], the same for all own blocks.
    listed: bool
    # Whether all tiles allowed by causality and documents are computed (static). Kernels may be
    # selected by it; the lists determine what is computed.
    dense: bool
    num_segments: int  # equal segments of the keys, processed one at a time (static)
    window: int | None = None  # see `DiagonalTiles` (static)

    @abc.abstractmethod
    def row_lists(self, num_query_blocks: int, num_key_blocks: int) -> Lists:
        """Returns entries, and the range first .. last - 1 of those of each query block.

        Ranges are int32 [B, Hq, nq], or [B, Hq, R, nq] for R consecutive ones.
        """

    @abc.abstractmethod
    def column_lists(self, num_query_blocks: int, num_key_blocks: int) -> Lists:
        """Returns entries, and the range of each key block, int32 [B, Hq, nk]."""

    @abc.abstractmethod
    def check(self, batch: int, heads: int, num_query_blocks: int, num_key_blocks: int) -> None: ...


def at_least_one(lists: Array) -> Array:
    """Appends an invalid entry to lists without capacity; kernels need at least one entry."""
    return lists if lists.shape[-1] else jnp.zeros((*lists.shape[:-1], 1), jnp.int32)


def check_shape(name: str, x: Array | None, shape: tuple[int, ...]) -> None:
    if x is None:
        raise ValueError(f"{name} is None; expected shape {shape}")
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}; expected {shape}")


def check_lists(name: str, x: Array, leading: tuple[int, ...]) -> None:
    """Raises ValueError unless `x` has shape [*leading, at least one]."""
    if x.shape[:-1] != leading or x.shape[-1] == 0:
        raise ValueError(
            f"{name} has shape {x.shape}; expected [{', '.join(map(str, leading))}, ...] with at "
            "least one entry in each list"
        )
