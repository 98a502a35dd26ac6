"""The work list of the fused backward kernel, and the order in which it sums dq.

Many items add to the dq of one query block, so each addition has a turn. An item only waits for
items before it in the list, and hardly waits if items of adjacent key blocks start together. Key
blocks rise from the last to the first, the rows of each from the first to the last; falling is the
mirror image. Rising causal items get longer, falling ones shorter: sequences alternate, so that
items end together. Sequences and documents shorter than a wave always rise: falling, each item
would wait for the previous one. Column tiles come first at every query block, from the last query
block to the first; with columns all sequences rise, one wave of every head after another, so that
few items need query blocks that the columns have not passed. With a window all rise as well: items
are equally long.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.tiles import Columns, DiagonalTiles, SegmentedDiagonals
from pallas_kernels.work.items import ITEM_FIELDS, KEY_BLOCKS, KeyItem, column_of, pack
from pallas_kernels.work.key_work import column_items
from pallas_kernels.work.lists import Sizes, walked_lists


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FusedWork:
    """Items in start order; entry s has turn `turns` + sign * `ranks`, column tile t turn t."""

    items: Array  # int32 [n, 8], rows of `KeyItem`
    lists: Array  # int32 [B, Hq, M], offsets: the query block is the key block + offset
    first: Array  # int32 [B, Hq, nk], the range of offsets of each key block
    last: Array
    diagonal: Array  # int32 [1], the offset of the tiles that are masked per element
    turns: Array  # int32 [B, Hq, nq]
    ranks: Array  # int32 [B, Hq, M]
    # Query heads that an item of key blocks processes, one after another.
    heads: int = jax.tree.static()
    window: int | None = jax.tree.static(default=None)  # as in `DiagonalTiles`

    @property
    def operands(self) -> dict[str, Array]:
        names = "items", "lists", "first", "last", "diagonal", "turns", "ranks"
        return {name: getattr(self, name) for name in names}


def fused_work(
    tiles: DiagonalTiles | SegmentedDiagonals | None,
    columns: Columns | None,
    sizes: Sizes,
    *,
    item_heads: int | None = None,
    wave: int = 0,
) -> FusedWork:
    """Builds the work list: column tiles first, then key blocks.

    Items have at most `item_heads` query heads (None for the group). After `wave` items of a
    sequence come as many of the next one (0: all).
    """
    group, num_query_blocks, num_key_blocks = sizes.group, sizes.query_blocks, sizes.key_blocks
    step = max(n for n in range(1, group + 1) if group % n == 0 and n <= (item_heads or group))
    lists, diagonal, _, first, last = walked_lists(tiles, sizes, own_queries=False)
    parts, column_turns = [], jnp.zeros((*sizes[:2], num_query_blocks), jnp.int32)
    if columns is not None:
        items = column_items(columns, num_query_blocks)
        parts.append(items)
        first_rows = items[:, column_of(KeyItem, "first_row")].reshape(*sizes[:2], -1)
        rows = jnp.arange(num_query_blocks, dtype=jnp.int32)
        column_turns = jnp.sum(first_rows[..., None] <= rows, axis=2, dtype=jnp.int32)
    turns, ranks, window = column_turns, jnp.zeros_like(lists), None
    if tiles is not None:
        wave, window = wave or num_key_blocks, tiles.window
        alternate = columns is None and window is None and num_key_blocks >= wave
        segments = tiles.num_segments
        items, falling = _key_items(sizes, step, wave, alternate=alternate, segments=segments)
        falls = jnp.asarray(falling)[..., None]  # per row
        items = jnp.asarray(items)
        if alternate and tiles.first_keys is not None and tiles.end_queries is not None:
            documents = tiles.first_keys[:, 0], tiles.end_queries[:, 0]
            items, falls = _turn_short_documents(*documents, items, falls, wave, group // step)
        parts.append(items)
        ranks, below, until = _ranks(tiles, num_query_blocks, num_key_blocks)
        turns += jnp.where(falls, until - 1, -below)
    items = jnp.concatenate(parts)
    return FusedWork(items, lists, first, last, diagonal, turns, ranks, step, window)


def _turn_short_documents(
    first: Array, end: Array, items: Array, falling: Array, wave: int, sharing: int
) -> tuple[Array, Array]:
    """Makes documents shorter than `wave` items rise; returns items, and which rows fall.

    `sharing` items have the same keys.
    """
    batch, num_blocks = end.shape
    places = jnp.arange(num_blocks, dtype=jnp.int32)
    edge = end[:, 1:] != end[:, :-1]
    start = jnp.where(jnp.pad(edge, ((0, 0), (1, 0)), constant_values=True), places, 0)
    start = jax.lax.cummax(start, axis=1)
    last = jnp.where(jnp.pad(edge, ((0, 0), (0, 1)), constant_values=True), places, num_blocks)
    last = jax.lax.cummin(last, axis=1, reverse=True)
    short = last - start + 1 < wave  # [B, nk]

    of = KeyItem(*items.T)
    at = of.batch, of.block
    rises = short[at] & (of.sign < 0)
    block = jnp.where(rises, start[at] + last[at] - of.block, of.block)
    # Items with the same keys add to dk and dv in list order, which has changed now.
    heads = items.shape[0] // (batch * num_blocks)
    at = of.batch, of.head // (falling.shape[1] // heads), block
    number = jnp.arange(items.shape[0], dtype=jnp.int32)
    number = jnp.zeros((batch, heads, num_blocks), jnp.int32).at[at].set(number)
    item_numbers = number.reshape(batch, -1, sharing, num_blocks)
    turns = jnp.sum(item_numbers[:, :, :, None] > item_numbers[:, :, None], axis=3, dtype=jnp.int32)
    of = of._replace(
        block=block, sign=jnp.where(rises, 1, of.sign), key_turn=turns.reshape(number.shape)[at]
    )
    seen = jnp.clip(first, 0, num_blocks - 1)  # a key block of each row's document
    return pack(of), falling & ~jnp.take_along_axis(short, seen, axis=1)[:, None]


def _ranks(
    tiles: DiagonalTiles | SegmentedDiagonals, num_query_blocks: int, num_key_blocks: int
) -> tuple[Array, Array, Array]:
    """Numbers valid offsets, nearest key first: int32 [B, Hq, M].

    Also returns each query block's first number with a key block, and one past the last.
    """
    _, first, last = tiles.row_lists(num_query_blocks, num_key_blocks)
    slots = jnp.arange(tiles.offsets.shape[-1], dtype=jnp.int32)
    start = tiles.start[..., None]
    if isinstance(tiles, DiagonalTiles):
        return slots - start, first - start, last - start
    segment = tiles.segment[:, None]
    in_run = (slots >= start) & (slots < tiles.stop[..., None])
    local = tiles.offsets[:, :, None] + segment * (num_key_blocks // tiles.num_segments)
    order = jnp.where(in_run, local * tiles.num_segments + segment, 0).sum(2, dtype=jnp.int32)
    order = jnp.argsort(jnp.where(in_run.any(2), order, np.iinfo(np.int32).max), axis=-1)
    ranks = jnp.put_along_axis(
        jnp.zeros_like(order), order, jnp.broadcast_to(slots, order.shape), -1, inplace=False
    )
    return ranks.astype(jnp.int32), (first - start).sum(2), (last - start).sum(2)


def _key_items(
    sizes: Sizes, step: int, wave: int, *, alternate: bool, segments: int
) -> tuple[np.ndarray, np.ndarray]:
    """Lists items of key blocks [n, 8] of `step` heads, and marks falling heads [B, Hq]."""
    batch, heads, _, num_key_blocks, _ = sizes
    group = sizes.group
    sequences = [(b, h) for b in range(batch) for h in range(0, heads, step)]
    together = 2 if alternate else len(sequences)
    order = [
        (b, h, start, alternate and member == 1)
        for first in range(0, len(sequences), together)
        for start in range(0, num_key_blocks, wave)
        for member, (b, h) in enumerate(sequences[first : first + together])
    ]
    falling = np.zeros((batch, heads), bool)
    rising = np.arange(num_key_blocks).reshape(segments, -1)[:, ::-1].T.ravel()
    items = []
    for b, h, start, falls in order:
        falling[b, h : h + step] = falls
        blocks = (rising[::-1] if falls else rising)[start : start + wave]
        part = np.zeros((blocks.size, ITEM_FIELDS), np.int32)
        of = KeyItem(*part.T)  # views of its columns
        of.kind[:], of.batch[:], of.head[:] = KEY_BLOCKS, b, h
        of.block[:], of.sign[:] = blocks, -1 if falls else 1
        items.append(part)
    items = np.concatenate(items)
    # Items with the same keys add to dk and dv in list order.
    of = KeyItem(*items.T)
    same = (of.batch * (heads // group) + of.head // group) * num_key_blocks + of.block
    order = np.argsort(same, kind="stable")
    size = items.shape[0] * step // group  # distinct keys: each has group / step items
    of.key_turn[order] = np.tile(np.arange(group // step), size)
    return items, falling
