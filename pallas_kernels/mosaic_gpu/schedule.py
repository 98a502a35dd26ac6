"""Work lists of the Hopper kernels: what each thread block does, and in which order.

Two aims set the order. All multiprocessors are to be busy to the end: items are in order of work,
short ones last. And items that run together are to read the same tiles: neighbouring blocks of the
heads that share keys run in step, so at any time they read a window of neighbouring tiles that
the L2 cache keeps.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.tiles import COLUMN_TILE, NO_DIAGONAL, Columns, Tiles, count_below

# Columns of an item of a row or column list.
BATCH, HEAD, BLOCK, FIRST, TILES, COLUMN_TILES, PAST_TILES = range(7)
ITEM_FIELDS = 8
# Query blocks from which on the keys of one head after the other are walked: all heads' together
# would not stay in the L2 cache. 256 blocks of keys and values take 8 (head dim 64) or 16 MiB.
LONG = 256


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["items", "lists", "diagonal", "run_first", "run_last"],
    meta_fields=["listed"],
)
@dataclasses.dataclass(frozen=True)
class WorkList:
    """What a kernel walks.

    Attributes:
        items: int32 [n, 8]: batch, head, own block, first list entry, number of list entries,
            number of column tiles, column tiles that need no test by position, unused.
        lists: int32; offsets [B, Hq, M] (`listed` false: the other block is own -/+ offset) or
            block numbers [B, Hq, n, M] (`listed` true).
        diagonal: int32 [1], the offset whose tiles are masked by element.
        run_first, run_last: int32 [B, Hq, R, n]: with `SegmentedDiagonals`, the entries of each
            run that an own block walks, one run after another; else None.
        listed: static.
    """

    items: Array
    lists: Array
    diagonal: Array
    run_first: Array | None
    run_last: Array | None
    listed: bool


def query_work(
    tiles: Tiles | None, columns: Columns | None, batch: int, heads: int,
    num_query_blocks: int, num_key_blocks: int, kv_heads: int,
) -> WorkList:
    """One item per (batch, head, query block): the key blocks and columns it attends to."""
    shape = (batch, heads, num_query_blocks)
    lists, diagonal, listed, first, last = _lists(
        tiles, shape, num_key_blocks, own_queries=True
    )
    runs = None, None
    count = last - first
    if first.ndim == 4:
        runs, lengths = (first, last), count
        count = lengths.sum(2)
        # The first entry of the first run that has any.
        run = jnp.argmax(lengths > 0, axis=2, keepdims=True)
        first = jnp.take_along_axis(first, run, axis=2)[:, :, 0]
    column_tiles = past_tiles = jnp.zeros(shape, jnp.int32)
    if columns is not None:
        column_tiles = (columns.limit + COLUMN_TILE - 1) // COLUMN_TILE
        past = past_columns(columns)
        # Where the main block diagonal is active no column of the queries' own block is kept.
        all_past = columns.limit <= past
        past_tiles = jnp.where(all_past, column_tiles, past // COLUMN_TILE)
    items = _row_items(first, count, column_tiles, past_tiles, kv_heads)
    return WorkList(items, lists, diagonal, *runs, listed)


def past_columns(columns: Columns) -> Array:
    """Int32 [B, Hq, num_query_blocks]: leading columns that lie before the whole query block."""
    starts = columns.query_blocks * columns.block_size
    return count_below(columns.tokens, starts)


def _lists(
    tiles: Tiles | None, shape: tuple[int, int, int], others: int, own_queries: bool
) -> tuple[Array, Array, bool, Array, Array]:
    """What the own blocks [B, Hq, n] of a kernel meet among `others` blocks of the other side.

    Returns:
        The lists, the masked offset [1], whether the lists hold block numbers, and the range
        first .. last - 1 of entries of each own block, int32 [B, Hq, n]; of each run and own
        block, [B, Hq, R, n], where a block of queries walks several.
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


def _row_items(
    first: Array, tiles: Array, column_tiles: Array, past_tiles: Array, kv_heads: int
) -> Array:
    """Items [n, 8] in order of work.

    Over long sequences those that read one key/value head come after those that read another's:
    the last one's begin with the longest, those of the one before with the shortest, and so on.
    Where one ends and the next begins items so are of a length, and the list ends with short ones.
    Of equal items later blocks come first, a block's heads side by side.
    """
    batch, heads, blocks = first.shape

    def iota(axis: int) -> Array:
        return jax.lax.broadcasted_iota(jnp.int32, first.shape, axis)

    fields = [iota(0), iota(1), iota(2), first, tiles, column_tiles, past_tiles]
    fields.append(jnp.zeros_like(first))
    items = jnp.flip(jnp.stack(fields, axis=-1), axis=2)
    parts = batch * kv_heads if blocks >= LONG else 1
    items = items.reshape(parts, -1, blocks, ITEM_FIELDS).swapaxes(1, 2)
    items = items.reshape(parts, -1, ITEM_FIELDS)
    work = items[..., TILES] + items[..., COLUMN_TILES]
    from_last = jnp.arange(parts)[::-1, None]
    order = jnp.argsort(jnp.where(from_last % 2 == 0, -work, work), axis=1, stable=True)
    return jnp.take_along_axis(items, order[..., None], axis=1).reshape(-1, ITEM_FIELDS)


def share(block: Array, num_items: int, num_blocks: int) -> tuple[Array, Callable[[Array], Array]]:
    """The items of one of `num_blocks` thread blocks: how many, and the number of its nth one.

    Items are dealt out to and fro: of the first `num_blocks` items block 0 takes the first, of the
    next as many the last. From a list in order of work, ascending or descending, all blocks so get
    the same amount, and go through it in step: what they read at the same time lies close together.
    """
    rounds, rest = divmod(num_items, num_blocks)

    def place(n: Array) -> Array:
        return jnp.where(n & 1 == 0, block, num_blocks - 1 - block)

    count = rounds + jnp.where(place(jnp.int32(rounds)) < rest, 1, 0)
    return count, lambda n: n * num_blocks + place(n)


# Columns of an item of a key work list.
KIND, KEY_BATCH, KEY_HEAD, KEY_BLOCK, FIRST_ROW, FULL_ROW = range(6)
KEY_BLOCKS, KEY_COLUMNS = range(2)  # values of KIND


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["items", "lists", "first", "last", "diagonal"],
    meta_fields=["listed"],
)
@dataclasses.dataclass(frozen=True)
class KeyWorkList:
    """What the kernel for dk and dv walks: key blocks and tiles of gathered columns.

    Attributes:
        items: int32 [n, 8]: kind, batch, head (key/value head of a block, query head of
            columns), own block or column tile; for columns the first query block that may see
            a token of the tile and the first that lies after all of them.
        lists: int32; offsets [B, Hq, M] or query blocks [B, Hq, nk, M], as in `WorkList`.
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
) -> KeyWorkList:
    """One item per (batch, key/value head, key block) and per (batch, head, column tile)."""
    group = heads // kv_heads
    shape = (batch, heads, num_key_blocks)
    lists, diagonal, listed, first, last = _lists(
        tiles, shape, num_query_blocks, own_queries=False
    )
    parts = []
    if columns is not None:
        # A tile of columns may see every query block, far more than a block of keys does.
        parts.append(_column_items(columns, num_query_blocks))
    if tiles is not None:
        none = jnp.zeros((batch, kv_heads, num_key_blocks), jnp.int32)
        items = _key_items(KEY_BLOCKS, none, none)
        if listed:
            work = (last - first).reshape(batch, kv_heads, group, num_key_blocks).sum(2)
            order = jnp.argsort(-work, axis=-1, stable=True)
            items = jnp.take_along_axis(items, order[..., None], axis=2)
        parts.append(items.reshape(-1, ITEM_FIELDS))
    return KeyWorkList(jnp.concatenate(parts), lists, first, last, diagonal, listed)


def _column_items(columns: Columns, num_query_blocks: int) -> Array:
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
    items = _key_items(KEY_COLUMNS, first_row, full_row)
    return items.reshape(-1, ITEM_FIELDS)


def _key_items(kind: int, first_row: Array, full_row: Array) -> Array:
    """Items [B, heads, blocks, 8] of one kind."""

    def iota(axis: int) -> Array:
        return jax.lax.broadcasted_iota(jnp.int32, first_row.shape, axis)

    fields = [jnp.full_like(iota(0), kind), iota(0), iota(1), iota(2), first_row, full_row]
    fields += [jnp.zeros_like(iota(0))] * (ITEM_FIELDS - len(fields))
    return jnp.stack(fields, axis=-1)
