"""Sizes and tile lists in the form that kernels read."""

from typing import NamedTuple, Self

import jax.numpy as jnp
from jax import Array

from pallas_kernels.checks import BLOCK_SIZE, Shaped
from pallas_kernels.tiles import NO_DIAGONAL, Tiles


class Sizes(NamedTuple):
    batch: int
    heads: int  # of queries
    query_blocks: int
    key_blocks: int
    kv_heads: int

    @classmethod
    def of(cls, q: Shaped, k: Shaped) -> Self:
        blocks = q.shape[1] // BLOCK_SIZE, k.shape[1] // BLOCK_SIZE
        return cls(q.shape[0], q.shape[2], *blocks, k.shape[2])

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


def far_entry(window: int) -> int:
    """Returns the first offset after the causal diagonal with tiles that a window cuts."""
    return max(window // BLOCK_SIZE, 1)


def walked_lists(
    tiles: Tiles | None, sizes: Sizes, own_queries: bool
) -> tuple[Array, Array, bool, Array, Array]:
    """Returns lists, masked offset [1], whether lists hold block numbers, and ranges of own blocks.

    Own blocks are those of queries or keys; see `Tiles.row_lists`.
    """
    blocks = sizes.query_blocks, sizes.key_blocks
    if tiles is None:
        zero = jnp.zeros((*sizes[:2], blocks[not own_queries]), jnp.int32)
        lists = jnp.zeros((*sizes[:2], 1), jnp.int32)
        return lists, jnp.full(1, NO_DIAGONAL), False, zero, zero
    lists, first, last = (tiles.row_lists if own_queries else tiles.column_lists)(*blocks)
    return lists, tiles.diagonal.reshape(1), tiles.listed, first, last
