"""The work list of the fused backward kernel, and the order in which it adds up dq.

Many items add to the dq of one query block, and floating point sums depend on their order, so
each addition has a turn. Turns follow the list of items: an item only ever waits for items
before it. Where items of neighbouring key blocks start together, the turns of a query block also
come up one step after another, and hardly anyone waits:

- Rising: key blocks from the last to the first, the rows of each from the first to the last. Row
  block i meets its own key block at that item's first step, the one before it at that item's
  second step, and so on.
- Falling: the mirror image, key blocks from the first to the last, the rows of each from the
  last to the first.

Causal items of a rising sequence get longer, those of a falling one shorter. Sequences alternate,
so that items end together: what ends up last is short, and pairs of a rising and a falling item
have the same length.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.mosaic_gpu.schedule import _column_items, _lists
from pallas_kernels.tiles import DiagonalTiles, VerticalColumns

# Columns of an item. The first six are those of `schedule.KeyWorkList`.
KIND, BATCH, HEAD, BLOCK, FIRST_ROW, FULL_ROW, SIGN, KEY_TURN = range(8)
KEY_BLOCKS, KEY_COLUMNS = range(2)  # values of KIND


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["items", "lists", "first", "last", "diagonal", "turns"],
    meta_fields=["heads"],
)
@dataclasses.dataclass(frozen=True)
class BackwardWork:
    """What the fused backward kernel walks, in the order in which its items must start.

    Attributes:
        items: int32 [n, 8]: kind, batch, first query head, key block or column tile; for columns
            the first query block that may see a token of the tile and the first that lies after
            all of them; for blocks 1 where rows rise and -1 where they fall, and the turn at
            which the item adds to its dk and dv.
        lists: int32 [B, Hq, M], offsets: the query block is the key block + offset.
        first, last: int32 [B, Hq, nk], the range of offsets of each key block.
        diagonal: int32 [1], the offset whose tiles are masked by element.
        turns: int32 [B, Hq, nq]: entry s of the offsets has turn `turns` + sign * s at a query
            block. Column tile t has turn t.
        heads: query heads that an item of key blocks walks, one after another (static).
    """

    items: Array
    lists: Array
    first: Array
    last: Array
    diagonal: Array
    turns: Array
    heads: int


def backward_work(
    tiles: DiagonalTiles | None, verticals: VerticalColumns | None, batch: int, heads: int,
    num_query_blocks: int, num_key_blocks: int, kv_heads: int, *, split_heads: bool = False,
    wave: int = 0,
) -> BackwardWork:
    """Column tiles first, then key blocks.

    Args:
        tiles: diagonals.
        verticals: columns.
        batch, heads, num_query_blocks, num_key_blocks, kv_heads: sizes.
        split_heads: an item for each query head, not for each key/value head: more and shorter
            items, whose dk and dv must be added up in memory.
        wave: items of a rising sequence that start before as many of the falling one; 0 for all.
            With the number of multiprocessors, and lengths as in a causal mask, items of one wave
            stay in step and walk the same rows at the same time.
    """
    group = heads // kv_heads
    shape = (batch, heads, num_key_blocks)
    lists, diagonal, _, first, last = _lists(tiles, shape, num_query_blocks, own_queries=False)
    parts, column_turns = [], jnp.zeros((batch, heads, num_query_blocks), jnp.int32)
    if verticals is not None:
        items = _column_items(verticals, num_query_blocks)
        parts.append(items)
        first_rows = items[:, FIRST_ROW].reshape(batch, heads, -1)
        rows = jnp.arange(num_query_blocks, dtype=jnp.int32)
        column_turns = jnp.sum(
            first_rows[..., None] <= rows, axis=2, dtype=jnp.int32
        )
    turns = column_turns
    if tiles is not None:
        items, falling = _key_items(batch, heads, num_key_blocks, group, split_heads, wave)
        parts.append(jnp.asarray(items))
        row_first, row_last = tiles.row_ranges(num_query_blocks, num_key_blocks)
        turns += jnp.where(jnp.asarray(falling)[..., None], row_last - 1, -row_first)
    return BackwardWork(
        jnp.concatenate(parts), lists, first, last, diagonal, turns, 1 if split_heads else group
    )


def _key_items(
    batch: int, heads: int, num_key_blocks: int, group: int, split_heads: bool, wave: int
) -> tuple[np.ndarray, np.ndarray]:
    """Items of key blocks [n, 8], and which heads have falling sequences [B, Hq]."""
    step = 1 if split_heads else group
    wave = wave or num_key_blocks
    sequences = [(b, h) for b in range(batch) for h in range(0, heads, step)]
    falling = np.zeros((batch, heads), bool)
    items = []
    for pair in range(0, len(sequences), 2):
        for start in range(0, num_key_blocks, wave):
            for member, (b, h) in enumerate(sequences[pair : pair + 2]):
                falling[b, h : h + step] = member == 1
                blocks = np.arange(start, min(start + wave, num_key_blocks))
                blocks = blocks if member == 1 else num_key_blocks - 1 - blocks
                part = np.zeros((blocks.size, 8), np.int32)
                part[:, KIND], part[:, BATCH], part[:, HEAD] = KEY_BLOCKS, b, h
                part[:, BLOCK], part[:, SIGN] = blocks, 1 - 2 * member
                items.append(part)
    items = np.concatenate(items)
    # Items with the same keys add to dk and dv in the order of the list.
    same = items[:, BATCH] * (heads // group) + items[:, HEAD] // group
    same = same * num_key_blocks + items[:, BLOCK]
    order = np.argsort(same, kind="stable")
    size = items.shape[0] * step // group  # distinct keys: each has group / step items
    items[order, KEY_TURN] = np.tile(np.arange(group // step), size)
    return items, falling
