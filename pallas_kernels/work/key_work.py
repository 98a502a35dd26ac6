"""Work list of the kernel for dk and dv, and its order."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.tiles import COLUMN_TILE, Columns, Tiles, count_below
from pallas_kernels.work.items import ITEM_FIELDS, KEY_BLOCKS, KEY_COLUMNS, KEY_PARTS, KeyItem, pack
from pallas_kernels.work.lists import Sizes, walked_lists

# In block lists, the key blocks seen by most query blocks are split into `PARTS` items each: one
# block of `_HEAVY_SHARE`, and at most `_MOST_HEAVY`. Every query block sees the first keys: as a
# single item they would take longer than everything else on a GPU with many multiprocessors, unless
# there are `_MANY_HEADS` key/value heads.
PARTS = 8
_BLOCK = 128  # keys per block
_MOST_HEAVY = 16
_HEAVY_SHARE = 16
_MANY_HEADS = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyWork:
    """Work list of the kernel for dk and dv: key blocks and tiles of gathered columns."""

    items: Array  # int32 [n, 8], rows of `KeyItem`
    lists: Array  # int32; offsets [B, Hq, M] or query blocks [B, Hq, nk, M], as in `QueryWork`
    first: Array  # int32 [B, Hq, nk], the range of list entries of each key block
    last: Array
    diagonal: Array  # int32 [1]
    heavy: Array | None  # int32 [B, Hk, M], key blocks that are split into `PARTS` items each
    listed: bool = jax.tree.static()
    # Whether items of columns store the query block they end with.
    ends: bool = jax.tree.static(default=False)
    window: int | None = jax.tree.static(default=None)  # as in `DiagonalTiles`

    @property
    def operands(self) -> dict[str, Array]:
        names = "items", "lists", "first", "last", "diagonal"
        return {name: getattr(self, name) for name in names}


def key_work(tiles: Tiles | None, columns: Columns | None, sizes: Sizes) -> KeyWork:
    """Builds items for each (batch, key/value head, key block) and (batch, head, column tile)."""
    lists, diagonal, listed, first, last = walked_lists(tiles, sizes, own_queries=False)
    shape = sizes.batch, sizes.kv_heads, sizes.key_blocks
    pieces, heavy = [], None
    if columns is not None:
        # A column tile may be seen by every query block, far more than a key block.
        pieces.append(column_items(columns, sizes.query_blocks))
    if tiles is not None:
        items = _items(KEY_BLOCKS, jnp.zeros(shape, jnp.int32))
        if listed:
            work = (last - first).reshape(*shape[:2], sizes.group, -1).sum(2)
            order = jnp.argsort(-work, axis=-1, stable=True)
            count = min(_MOST_HEAVY, sizes.key_blocks // _HEAVY_SHARE)
            count *= sizes.kv_heads < _MANY_HEADS
            if count:
                heavy = order[..., :count].astype(jnp.int32)
            items = jnp.take_along_axis(items, order[..., count:, None], axis=2)
            if heavy is not None:
                items = jnp.concatenate([_parts_of(heavy), items], axis=2)
        pieces.append(items.reshape(-1, ITEM_FIELDS))
    ends = columns is not None and columns.ends is not None
    items, window = jnp.concatenate(pieces), None if tiles is None else tiles.window
    return KeyWork(items, lists, first, last, diagonal, heavy, listed, ends, window)


def _parts_of(heavy: Array) -> Array:
    """Splits key blocks [B, Hk, M] into items [B, Hk, M * PARTS, 8], those of a block together."""
    batch, head, n, part = jnp.indices((*heavy.shape, PARTS), jnp.int32, sparse=True)
    slot = n * PARTS + part
    item = KeyItem(KEY_PARTS, batch, head, heavy[..., None], part, slot, 0, 0)
    return pack(item).reshape(*heavy.shape[:2], -1, ITEM_FIELDS)


def join_parts(heavy: Array, keys: Array, parts: Array) -> Array:
    """Replaces gradients `keys` [..., B, nk, Hk, D] of split blocks by the sums of their parts."""
    batch, kv_heads, count = heavy.shape
    head_dim = keys.shape[-1]
    blocks = keys.reshape(-1, batch, keys.shape[-3] // _BLOCK, _BLOCK, kv_heads, head_dim)
    sums = parts.reshape(-1, batch, count, PARTS, _BLOCK, kv_heads, head_dim).sum(3)
    # Separated advanced indices put their axes first: [B, Hk, M, pairs, 128, D].
    sums = sums.transpose(1, 4, 2, 0, 3, 5).astype(keys.dtype)
    entry, head = jnp.arange(batch)[:, None, None], jnp.arange(kv_heads)[:, None]
    blocks = blocks.at[:, entry, heavy, :, head].set(sums, unique_indices=True)
    return blocks.reshape(keys.shape)


def column_items(columns: Columns, num_query_blocks: int) -> Array:
    """Returns the items [n, 8] of column tiles, head by head, the earliest tile first."""
    g = columns.block_size
    tokens = columns.tokens.reshape(*columns.tokens.shape[:2], -1, COLUMN_TILE)
    slots = jnp.arange(tokens.shape[2] * COLUMN_TILE, dtype=jnp.int32)
    live = (slots < columns.count[..., None]).reshape(tokens.shape)
    # The last valid token of a tile; a tile without any is not processed at all.
    latest = jnp.max(jnp.where(live, tokens, -1), axis=-1)

    rows = columns.query_blocks
    first_row = jnp.where(live.any(-1), count_below(rows, tokens[..., 0] // g), num_query_blocks)
    full_row = jnp.where(live.any(-1), count_below(rows, latest // g + 1), num_query_blocks)
    if columns.ends is None:
        return _items(KEY_COLUMNS, first_row, full_row).reshape(-1, ITEM_FIELDS)
    ends = jnp.maximum(columns.ends, first_row)
    full_row = jnp.minimum(full_row, ends)
    return _items(KEY_COLUMNS, first_row, full_row, ends).reshape(-1, ITEM_FIELDS)


def _items(kind: int, first_row: Array, full_row: Array | int = 0, sign: Array | int = 0) -> Array:
    batch, head, block = jnp.indices(first_row.shape, jnp.int32, sparse=True)
    return pack(KeyItem(kind, batch, head, block, first_row, full_row, sign, 0))
