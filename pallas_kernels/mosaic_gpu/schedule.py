"""Work lists of the Hopper kernels: what each thread block does, longest work first.

The kernels are persistent: block c of n takes items c, c + n, c + 2n, ... of a list sorted by
work, so that rows of very different length keep all multiprocessors busy to the end.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.index import BlockSparseIndex
from pallas_kernels.tiles import COLUMN_TILE, NO_DIAGONAL, DiagonalTiles, Tiles, VerticalColumns

# Columns of an item of a row or column list.
BATCH, HEAD, BLOCK, FIRST, TILES, COLUMN_TILES, PAST_TILES = range(7)
ITEM_FIELDS = 8


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["items", "lists", "diagonal"],
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
        listed: static.
    """

    items: Array
    lists: Array
    diagonal: Array
    listed: bool


def query_work(
    tiles: Tiles | None, verticals: VerticalColumns | None, batch: int, heads: int,
    num_query_blocks: int, num_key_blocks: int, kv_heads: int,
) -> WorkList:
    """One item per (batch, head, query block): the key blocks and columns it attends to."""
    shape = (batch, heads, num_query_blocks)
    lists, diagonal, listed, first, last = _row_lists(tiles, shape, num_key_blocks)
    column_tiles = past_tiles = jnp.zeros(shape, jnp.int32)
    if verticals is not None:
        column_tiles = (verticals.limit + COLUMN_TILE - 1) // COLUMN_TILE
        past = past_columns(verticals)
        # Where the main block diagonal is active no column of the queries' own block is kept.
        all_past = verticals.limit <= past
        past_tiles = jnp.where(all_past, column_tiles, past // COLUMN_TILE)
    items = _sorted_items(first, last - first, column_tiles, past_tiles, kv_heads)
    return WorkList(items, lists, diagonal, listed)


def past_columns(verticals: VerticalColumns) -> Array:
    """Int32 [B, Hq, num_query_blocks]: leading columns that lie before the whole query block."""
    starts = verticals.query_blocks * verticals.block_size
    search = functools.partial(jnp.searchsorted, side="left", method="scan_unrolled")
    flat = verticals.tokens.reshape(-1, verticals.tokens.shape[-1])
    counts = jax.vmap(lambda row: search(row, starts))(flat)
    return counts.reshape(*verticals.tokens.shape[:2], -1).astype(jnp.int32)


def _row_lists(
    tiles: Tiles | None, shape: tuple[int, int, int], num_key_blocks: int
) -> tuple[Array, Array, bool, Array, Array]:
    if tiles is None:
        zero = jnp.zeros(shape, jnp.int32)
        lists = jnp.zeros((*shape[:2], 1), jnp.int32)
        return lists, jnp.full(1, NO_DIAGONAL), False, zero, zero
    if isinstance(tiles, DiagonalTiles):
        first, last = tiles.row_ranges(shape[2], num_key_blocks)
        return tiles.offsets, tiles.diagonal.reshape(1), False, first, last
    return (
        tiles.key_blocks, _listed_diagonal(tiles), True,
        jnp.zeros_like(tiles.key_count), tiles.key_count,
    )


def _listed_diagonal(tiles: BlockSparseIndex) -> Array:
    return jnp.full(1, 0 if tiles.causal else NO_DIAGONAL, jnp.int32)


def _sorted_items(
    first: Array, tiles: Array, column_tiles: Array, past_tiles: Array, kv_heads: int
) -> Array:
    """Items of one key/value head after another, each head's longest first.

    What runs together then shares one head's keys and values in the L2 cache, and the list
    still ends with short items.
    """
    batch, heads, blocks = first.shape
    group = heads // kv_heads

    def flat(x: Array) -> Array:
        """[B, Hq, n] -> [B * Hk, n * group], late blocks first, a block's heads side by side."""
        x = jnp.flip(x.reshape(batch * kv_heads, group, blocks), axis=2)
        return x.swapaxes(1, 2).reshape(batch * kv_heads, -1)

    def iota(axis: int) -> Array:
        return jax.lax.broadcasted_iota(jnp.int32, first.shape, axis)

    total = flat(tiles + column_tiles)
    order = jnp.argsort(-total, axis=-1, stable=True)
    fields = [iota(0), iota(1), iota(2), first, tiles, column_tiles, past_tiles]
    fields = [jnp.take_along_axis(flat(x), order, axis=-1) for x in fields]
    fields.append(jnp.zeros_like(order))
    return jnp.stack(fields, axis=-1).reshape(-1, ITEM_FIELDS)


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
    tiles: Tiles | None, verticals: VerticalColumns | None, batch: int, heads: int,
    num_query_blocks: int, num_key_blocks: int, kv_heads: int,
) -> KeyWorkList:
    """One item per (batch, key/value head, key block) and per (batch, head, column tile)."""
    group = heads // kv_heads
    shape = (batch, heads, num_key_blocks)
    lists, diagonal, listed, first, last = _column_lists(tiles, shape, num_query_blocks)
    parts = []
    if tiles is not None:
        work = (last - first).reshape(batch, kv_heads, group, num_key_blocks).sum(2)
        parts.append(_key_items(KEY_BLOCKS, work, kv_heads, jnp.zeros_like(work), work))
    if verticals is not None:
        g = verticals.block_size
        tokens = verticals.tokens.reshape(batch, heads, -1, COLUMN_TILE)
        slots = jnp.arange(tokens.shape[2] * COLUMN_TILE, dtype=jnp.int32)
        live = (slots < verticals.count[..., None]).reshape(tokens.shape)
        # The last live token of a tile; a tile without any is not walked at all.
        latest = jnp.max(jnp.where(live, tokens, -1), axis=-1)
        search = functools.partial(jnp.searchsorted, verticals.query_blocks, side="left")
        first_row = jnp.where(live.any(-1), search(tokens[..., 0] // g), num_query_blocks)
        full_row = jnp.where(live.any(-1), search(latest // g + 1), num_query_blocks)
        parts.append(
            _key_items(
                KEY_COLUMNS, num_query_blocks - first_row, kv_heads,
                first_row.astype(jnp.int32), full_row.astype(jnp.int32),
            )
        )
    items = jnp.concatenate([items for items, _ in parts], axis=1)
    work = jnp.concatenate([work for _, work in parts], axis=1)
    order = jnp.argsort(-work, axis=-1, stable=True)
    items = jnp.take_along_axis(items, order[..., None], axis=1)
    return KeyWorkList(
        items.reshape(-1, ITEM_FIELDS), lists, first, last, diagonal, listed
    )


def _key_items(
    kind: int, work: Array, kv_heads: int, first_row: Array, full_row: Array
) -> tuple[Array, Array]:
    """Items [B * Hk, n, 8] and their work [B * Hk, n], from [B, heads, blocks]."""

    def iota(axis: int) -> Array:
        return jax.lax.broadcasted_iota(jnp.int32, work.shape, axis)

    def flat(x: Array) -> Array:
        return x.reshape(work.shape[0] * kv_heads, -1)

    fields = [jnp.full_like(iota(0), kind), iota(0), iota(1), iota(2), first_row, full_row]
    fields += [jnp.zeros_like(iota(0))] * (ITEM_FIELDS - len(fields))
    return jnp.stack([flat(x) for x in fields], axis=-1), flat(work)


def _column_lists(
    tiles: Tiles | None, shape: tuple[int, int, int], num_query_blocks: int
) -> tuple[Array, Array, bool, Array, Array]:
    if tiles is None:
        zero = jnp.zeros(shape, jnp.int32)
        lists = jnp.zeros((*shape[:2], 1), jnp.int32)
        return lists, jnp.full(1, NO_DIAGONAL), False, zero, zero
    if isinstance(tiles, DiagonalTiles):
        first, last = tiles.column_ranges(num_query_blocks, shape[2])
        return tiles.offsets, tiles.diagonal.reshape(1), False, first, last
    return (
        tiles.query_blocks, _listed_diagonal(tiles), True,
        jnp.zeros_like(tiles.query_count), tiles.query_count,
    )
