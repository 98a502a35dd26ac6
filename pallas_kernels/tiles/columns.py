"""Gathered key columns: which query block sees which of them, and how they are fetched."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.tiles.tiles import check_shape

COLUMN_TILE = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Columns:
    """Key columns, per batch entry and query head, as seen by one shard of queries.

    Query token t of local block i computes column c iff `keep` bit (i, c) is set and tokens[c] <=
    position of t. Bits are off if the column is in an active block (which computes it), in a later
    block than the queries, or in another document. `first` and `ends` let kernels skip columns of
    other documents; None if they start with the first column.
    """

    tokens: Array  # int32 [B, Hq, Mv], positions, ascending, padding past all; 128 divides Mv
    count: Array  # int32 [B, Hq]
    keep: Array  # uint32 [B, Hq, n, Mv // 32]; bit c % 32 of word c // 32 is that of column c
    limit: Array  # int32 [B, Hq, n], one past the last column with its bit on
    query_blocks: Array  # int32 [n], ascending global block numbers
    block_size: int = jax.tree.static()  # g
    first: Array | None = None  # int32 [B, Hq, n], the first column with its bit on; or 0
    # int32 [B, Hq, Mv // 128], one past the last query block that sees a tile of columns; or 0.
    ends: Array | None = None

    @classmethod
    def beside(
        cls,
        covered: Array,
        tokens: Array,
        query_blocks: Array,
        num_blocks: int,
        block_size: int,
        apart: bool = False,
    ) -> Self:
        """Builds the columns in addition to the tiles of one shard of queries.

        `covered`, bool [B, Hq, n, Mv]: a query block computes the block of a column, or does not
        see it. `apart`: query blocks see separate runs of columns, as in packed documents.
        """
        seen = tokens[:, :, None] // block_size <= query_blocks[:, None]
        keep = seen & ~covered
        slots = jnp.arange(tokens.shape[-1], dtype=jnp.int32)
        limit = jnp.max(jnp.where(keep, slots + 1, 0), axis=-1, initial=0)
        words = keep.reshape(*keep.shape[:-1], -1, 32).astype(jnp.uint32)
        words = jnp.sum(words << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
        count = (tokens < num_blocks * block_size).sum(-1, dtype=jnp.int32)
        found = cls(tokens, count, words, limit, query_blocks.astype(jnp.int32), block_size)
        if not apart:
            return found
        first = jnp.where(limit > 0, jnp.argmax(keep, axis=-1).astype(jnp.int32), 0)
        tile_has_kept = keep.reshape(*keep.shape[:-1], -1, COLUMN_TILE).any(-1)
        number = jnp.arange(1, keep.shape[2] + 1, dtype=jnp.int32)[:, None]
        ends = jnp.where(tile_has_kept, number, 0).max(2, initial=0)
        return dataclasses.replace(found, first=first, ends=ends)

    def check(self, batch: int, heads: int, num_query_blocks: int) -> None:
        capacity = self.tokens.shape[-1]
        if capacity == 0 or capacity % COLUMN_TILE:
            raise ValueError(
                f"columns.tokens has {capacity} columns; expected a positive multiple of "
                f"{COLUMN_TILE}"
            )
        check_shape("columns.tokens", self.tokens, (batch, heads, capacity))
        shape = batch, heads, num_query_blocks
        check_shape("columns.keep", self.keep, (*shape, capacity // 32))
        check_shape("columns.limit", self.limit, shape)
        check_shape("columns.query_blocks", self.query_blocks, (num_query_blocks,))
        if self.first is not None:
            check_shape("columns.first", self.first, shape)
            check_shape("columns.ends", self.ends, (batch, heads, capacity // COLUMN_TILE))


def padded_columns(tokens: Array, count: Array) -> Array:
    """Pads columns int32 [B, Hq, C] (the first `count` ascend) to whole tiles, past every query."""
    padding = -tokens.shape[-1] % COLUMN_TILE
    slots = jnp.arange(tokens.shape[-1], dtype=jnp.int32)
    past = jnp.int32(jnp.iinfo(jnp.int32).max)
    tokens = jnp.where(slots < count[..., None], tokens, past)
    return jnp.pad(tokens, ((0, 0), (0, 0), (0, padding)), constant_values=past)


def gather_columns(x: Array, tokens: Array) -> Array:
    """Gathers columns of keys or values [B, S, Hk, D]: [B, Mv, Hq, D], zeros outside of [0, S)."""
    group = tokens.shape[1] // x.shape[2]
    heads = np.arange(tokens.shape[1], dtype=np.int32) // group
    batch = np.arange(x.shape[0], dtype=np.int32)
    # Negative positions do not wrap around: "fill" applies to them too.
    return x.at[batch[:, None, None], tokens.swapaxes(1, 2), heads[None, None, :]].get(
        mode="fill", fill_value=0, wrap_negative_indices=False
    )


def scatter_columns(target: Array, columns: Array, tokens: Array) -> Array:
    """Adds gradients of gathered columns fp32 [B, Mv, Hq, D] to `target`, fp32 [B, S, Hk, D].

    Drops positions outside of S. Query heads of a group are added one after another, so the sum has
    a fixed order.
    """
    num_kv_heads = target.shape[2]
    group = tokens.shape[1] // num_kv_heads
    heads = np.arange(num_kv_heads, dtype=np.int32)
    batch = np.arange(target.shape[0], dtype=np.int32)
    # Dropped positions get distinct values past the end, as unique_indices requires.
    slots = jnp.arange(tokens.shape[-1], dtype=jnp.int32)
    outside = (tokens < 0) | (tokens >= target.shape[1])
    tokens = jnp.where(outside, target.shape[1] + slots, tokens)
    tokens = tokens.reshape(tokens.shape[0], num_kv_heads, group, -1)
    columns = columns.reshape(*columns.shape[:2], num_kv_heads, group, -1)
    for member in range(group):
        target = target.at[
            batch[:, None, None], tokens[:, :, member].swapaxes(1, 2), heads[None, None, :]
        ].add(
            columns[:, :, :, member], mode="drop", unique_indices=True, wrap_negative_indices=False
        )
    return target
