"""Work list of the forward kernel and the one for dq, and its order.

Items are sorted by work, short ones last. With diagonals, blocks of heads that share keys run in
step.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.tiles import COLUMN_TILE, Columns, DiagonalTiles, Tiles, count_below
from pallas_kernels.work.items import ITEM_FIELDS, QueryItem, column_of, pack
from pallas_kernels.work.lists import Sizes, walked_lists

# The L2 cache holds the keys and values of so many blocks: 8 (head dim 64) or 16 MiB. Key/value
# heads with more are processed one after another. Shorter ones are processed as many at a time as
# fit, where keys would come from memory otherwise: with lists, and with dense attention if at most
# `SMALL_GROUP` query heads share them. Other diagonals are more evenly assigned all at once.
CACHED_BLOCKS = 256
SMALL_GROUP = 4
LONGEST = 1 / 1024  # items of lists with more than this part of all work come first


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QueryWork:
    items: Array  # int32 [n, 8], rows of `QueryItem`
    lists: Array  # int32; offsets [B, Hq, M] or key blocks [B, Hq, n, M]
    diagonal: Array  # int32 [1], the offset of the tiles that are masked per element
    run_first: Array | None  # int32 [B, Hq, R, n], the runs of `SegmentedDiagonals`; else None
    run_last: Array | None
    # Whether `lists` are key blocks; an offset is query block - key block.
    listed: bool = jax.tree.static()
    skips_columns: bool = jax.tree.static(default=False)  # whether items have a `first_column_tile`
    window: int | None = jax.tree.static(default=None)  # as in `DiagonalTiles`


def query_work(tiles: Tiles | None, columns: Columns | None, sizes: Sizes) -> QueryWork:
    """Builds one item per (batch, head, query block): its key blocks and columns."""
    lists, diagonal, listed, first, last = walked_lists(tiles, sizes, own_queries=True)
    runs = None, None
    count = last - first
    if first.ndim == 4:
        runs, lengths = (first, last), count
        count = lengths.sum(2)
        # The first entry of the first nonempty run.
        run = jnp.argmax(lengths > 0, axis=2, keepdims=True)
        first = jnp.take_along_axis(first, run, axis=2)[:, :, 0]
    column_tiles = past_tiles = jnp.zeros_like(first)
    first_column_tile = None
    if columns is not None:
        column_tiles = (columns.limit + COLUMN_TILE - 1) // COLUMN_TILE
        past = past_columns(columns)
        # If the main block diagonal is active, no column of the queries' own block is kept.
        all_past = columns.limit <= past
        past_tiles = jnp.where(all_past, column_tiles, past // COLUMN_TILE)
        if columns.first is not None:
            first_column_tile = columns.first // COLUMN_TILE
            # All kept columns may be in the queries' own block.
            past_tiles = jnp.maximum(past_tiles, first_column_tile)
    walked = count, column_tiles, past_tiles, first_column_tile
    window = None if tiles is None else tiles.window
    sequences = sizes.batch * sizes.kv_heads
    parts = sequences if sizes.query_blocks >= CACHED_BLOCKS else 1
    dense = isinstance(tiles, DiagonalTiles) and tiles.dense and window is None and columns is None
    if listed or (dense and sizes.group <= SMALL_GROUP):
        most = sequences * sizes.key_blocks / CACHED_BLOCKS
        fits = (n for n in range(1, sequences) if sequences % n == 0 and n >= most)
        parts = next(fits, sequences)
    items = _row_items(first, *walked, parts, listed, in_order=window is not None)
    skips = first_column_tile is not None
    return QueryWork(items, lists, diagonal, *runs, listed, skips, window)


def past_columns(columns: Columns) -> Array:
    """Counts leading columns before the whole query block: int32 [B, Hq, num_query_blocks]."""
    starts = columns.query_blocks * columns.block_size
    return count_below(columns.tokens, starts)


def _row_items(
    first: Array,
    tiles: Array,
    column_tiles: Array,
    past_tiles: Array,
    first_column_tile: Array | None,
    parts: int,
    listed: bool,
    in_order: bool,
) -> Array:
    """Returns the items [n, 8], one of `parts` of the heads after another, each in order of work.

    Parts alternate between rising and falling lengths. The longest items of lists come first. Ties
    go to later blocks. `in_order`: items are about equally long, and all stay in the order of ties.
    """
    entry, head, block = jnp.indices(first.shape, jnp.int32, sparse=True)
    walked = tiles, column_tiles, past_tiles, first_column_tile
    item = QueryItem(entry, head, block, first, *walked)
    items = jnp.flip(pack(item), axis=2)
    items = items.reshape(parts, -1, first.shape[2], ITEM_FIELDS).swapaxes(1, 2)
    if in_order:
        return items.reshape(-1, ITEM_FIELDS)
    items = items.reshape(parts, -1, ITEM_FIELDS)
    tiles_of, columns_of = (column_of(QueryItem, name) for name in ("tiles", "column_tiles"))
    work = items[..., tiles_of] + items[..., columns_of]
    if first_column_tile is not None:
        work -= items[..., column_of(QueryItem, "first_column_tile")]
    number = jnp.arange(parts)[:, None]
    apart = 2 * work.max() + 1
    order = number * apart + jnp.where((parts - 1 - number) % 2 == 0, -work, work)
    if listed:  # the longest, begun late, would outlast all others
        longest = work > work.sum(dtype=jnp.float32) * LONGEST
        order = jnp.where(longest, -apart - work, order)
    return items.reshape(-1, ITEM_FIELDS)[jnp.argsort(order.ravel(), stable=True)]


def assigned_item(n: Array, block: Array, num_blocks: int) -> Array:
    """Returns the number of a thread block's nth item if each has a fixed part of them.

    In alternating order; from the number of items on there are none left.
    """
    return n * num_blocks + jnp.where(n & 1 == 0, block, num_blocks - 1 - block)
