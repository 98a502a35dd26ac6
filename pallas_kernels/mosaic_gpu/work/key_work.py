"""What the kernel for dk and dv walks, and in which order."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.mosaic_gpu.work.items import (
    ITEM_FIELDS,
    KEY_BLOCKS,
    KEY_COLUMNS,
    KeyItem,
    pack,
)
from pallas_kernels.mosaic_gpu.work.lists import walked_lists
from pallas_kernels.tiles import COLUMN_TILE, Columns, Tiles, count_below


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["items", "lists", "first", "last", "diagonal"],
    meta_fields=["listed"],
)
@dataclasses.dataclass(frozen=True)
class KeyWork:
    """What the kernel for dk and dv walks: key blocks and tiles of gathered columns.

    Attributes:
        items: int32 [n, 8], of `KeyItem`.
        lists: int32; offsets [B, Hq, M] or query blocks [B, Hq, nk, M], as in `QueryWork`.
        first, last: int32 [B, Hq, nk], the range of list entries of each key block.
        diagonal: int32 [1].
        listed: static.
    """

    items: Array
    lists: Array
    first: Array
    last: Array
    diagonal: Array
    listed: bool


def key_work(
    tiles: Tiles | None, columns: Columns | None, batch: int, heads: int,
    num_query_blocks: int, num_key_blocks: int, kv_heads: int,
) -> KeyWork:
    """One item per (batch, key/value head, key block) and per (batch, head, column tile)."""
    group = heads // kv_heads
    shape = (batch, heads, num_key_blocks)
    lists, diagonal, listed, first, last = walked_lists(
        tiles, shape, num_query_blocks, own_queries=False
    )
    parts = []
    if columns is not None:
        # A tile of columns may see every query block, far more than a block of keys does.
        parts.append(column_items(columns, num_query_blocks))
    if tiles is not None:
        items = _items(KEY_BLOCKS, jnp.zeros((batch, kv_heads, num_key_blocks), jnp.int32))
        if listed:
            work = (last - first).reshape(batch, kv_heads, group, num_key_blocks).sum(2)
            order = jnp.argsort(-work, axis=-1, stable=True)
            items = jnp.take_along_axis(items, order[..., None], axis=2)
        parts.append(items.reshape(-1, ITEM_FIELDS))
    return KeyWork(jnp.concatenate(parts), lists, first, last, diagonal, listed)


def column_items(columns: Columns, num_query_blocks: int) -> Array:
    """Items [n, 8] of the tiles of columns, one head's after another's, the earliest first."""
    g = columns.block_size
    tokens = columns.tokens.reshape(*columns.tokens.shape[:2], -1, COLUMN_TILE)
    slots = jnp.arange(tokens.shape[2] * COLUMN_TILE, dtype=jnp.int32)
    live = (slots < columns.count[..., None]).reshape(tokens.shape)
    # The last live token of a tile; a tile without any is not walked at all.
    latest = jnp.max(jnp.where(live, tokens, -1), axis=-1)

    rows = columns.query_blocks
    first_row = jnp.where(live.any(-1), count_below(rows, tokens[..., 0] // g), num_query_blocks)
    full_row = jnp.where(live.any(-1), count_below(rows, latest // g + 1), num_query_blocks)
    return _items(KEY_COLUMNS, first_row, full_row).reshape(-1, ITEM_FIELDS)


def _items(kind: int, first_row: Array, full_row: Array | int = 0) -> Array:
    """Items [B, heads, blocks, 8] of one kind."""

    def iota(axis: int) -> Array:
        return jax.lax.broadcasted_iota(jnp.int32, first_row.shape, axis)

    return pack(KeyItem(kind, iota(0), iota(1), iota(2), first_row, full_row, 0, 0))
