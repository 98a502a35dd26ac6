"""Tile lists in the form that kernels read."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.tiles import NO_DIAGONAL, Tiles


def walked_lists(
    tiles: Tiles | None, shape: tuple[int, int, int], others: int, own_queries: bool
) -> tuple[Array, Array, bool, Array, Array]:
    """Returns what own blocks [B, Hq, n] of a kernel meet among `others` blocks of the other side.

    In order: lists, masked offset [1], whether lists hold block numbers, and the range first ..
    last - 1 of entries of each own block, int32 [B, Hq, n] or, by run, [B, Hq, R, n].
    """
    if tiles is None:
        zero = jnp.zeros(shape, jnp.int32)
        lists = jnp.zeros((*shape[:2], 1), jnp.int32)
        return lists, jnp.full(1, NO_DIAGONAL), False, zero, zero
    if own_queries:
        lists, (first, last) = tiles.row_entries, tiles.row_ranges(shape[2], others)
    else:
        lists, (first, last) = tiles.column_entries, tiles.column_ranges(others, shape[2])
    return lists, tiles.diagonal.reshape(1), tiles.listed, first, last
