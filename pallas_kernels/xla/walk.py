"""Traversal of the XLA backend's passes: blocks of the other side, and tiles of columns."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.tiles import COLUMN_TILE, Columns, Tiles
from pallas_kernels.xla.products import entry, slice_from, slice_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Walk:
    """The blocks of the other side that own blocks meet, in order."""

    entries: Array  # int32; offsets [B, Hq, M], or blocks of the other side [B, Hq, n, M]
    first: Array  # int32 [B, Hq, R, n], the consecutive ranges of entries of each own block
    last: Array
    diagonal: Array  # int32 [], the offset of the tiles that are masked per element
    listed: bool = jax.tree.static()  # whether entries are blocks
    owns_queries: bool = jax.tree.static()  # whether own blocks are query blocks, else key blocks
    num_others: int = jax.tree.static()  # number of blocks of the other side
    block_size: int = jax.tree.static()
    window: int | None = jax.tree.static(default=None)  # as in `DiagonalTiles`

    def fold(self, own: Array, step: Callable, state: Any) -> Any:
        """Folds step(other block [B, Hq, n], mask [B, Hq, n, g|1, g|1], state) over all entries."""

        def run(number: Array | int, state: Any) -> Any:
            first, last = (slice_rows(entry(x, number, 2), own) for x in (self.first, self.last))
            return self._fold_range(first, last, own, step, state)

        runs = self.first.shape[2]
        return run(0, state) if runs == 1 else lax.fori_loop(0, runs, run, state)

    def _fold_range(self, first: Array, last: Array, own: Array, step: Callable, state: Any) -> Any:
        some = last > first
        lowest = jnp.min(jnp.where(some, first, jnp.iinfo(jnp.int32).max))
        square = self.block_size, self.block_size
        distance = lax.broadcasted_iota(jnp.int32, square, 0) - lax.broadcasted_iota(
            jnp.int32, square, 1
        )

        def visit(slot: Array, state: Any) -> Any:
            block, offset = self._at(own, slot)
            listed = (slot >= first) & (slot < last)
            diagonal = jnp.broadcast_to(offset == self.diagonal, listed.shape)[..., None, None]
            mask = listed[..., None, None] & (~diagonal | (distance >= 0))
            if self.window is not None:
                tokens = (offset - self.diagonal)[..., None, None] * self.block_size + distance
                mask &= tokens < self.window
            return step(jnp.clip(block, 0, self.num_others - 1), mask, state)

        stop = jnp.max(jnp.where(some, last, 0))
        return lax.fori_loop(jnp.where(some.any(), lowest, 0), stop, visit, state)

    def _at(self, own: Array, slot: Array) -> tuple[Array, Array]:
        sign = 1 if self.owns_queries else -1
        if self.listed:
            block = entry(slice_rows(self.entries, own), slot, -1)
            return block, sign * (own - block)
        offset = entry(self.entries, slot, -1)[..., None]
        return own - sign * offset, offset


class XlaWork(NamedTuple):
    rows: Walk | None
    columns: Walk | None


def xla_work(tiles: Tiles | None, num_queries: int, num_keys: int) -> XlaWork:
    if tiles is None:
        return XlaWork(None, None)
    sizes = num_queries // tiles.block_size, num_keys // tiles.block_size

    def walk(lists: tuple[Array, Array, Array], owns_queries: bool) -> Walk:
        entries, *ranges = lists
        first, last = (x if x.ndim == 4 else x[:, :, None] for x in ranges)
        how = tiles.listed, owns_queries, sizes[owns_queries], tiles.block_size, tiles.window
        return Walk(entries, first, last, tiles.diagonal, *how)

    return XlaWork(
        walk(tiles.row_lists(*sizes), owns_queries=True),
        walk(tiles.column_lists(*sizes), owns_queries=False),
    )


def fold_columns(
    columns: Columns | None,
    column_kv: tuple[Array, Array] | None,
    rows: Array,
    step: Callable[[Array, Array, Array, Any], Any],
    state: Any,
) -> Any:
    """Folds step(keys, values, mask, state) over the column tiles that some query blocks see."""
    if columns is None or column_kv is None:
        return state

    def visit(tile: Array, state: Any) -> Any:
        return step(*column_tile(columns, column_kv, tile, rows), state)

    return lax.fori_loop(*_column_tiles(columns, rows), visit, state)


def column_tile(
    columns: Columns, column_kv: tuple[Array, Array], tile: Array, rows: Array
) -> tuple[Array, Array, Array]:
    """Returns keys, values [B, Hq, 1, T, D] and mask [B, Hq, rows, g, T] of one column tile."""
    start = tile * COLUMN_TILE
    keys, values = (
        slice_from(x, start, COLUMN_TILE, axis=1).swapaxes(1, 2)[:, :, None] for x in column_kv
    )
    words = slice_from(
        slice_rows(columns.keep, rows), tile * (COLUMN_TILE // 32), COLUMN_TILE // 32, axis=-1
    )
    bits = (words[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    keep = bits.reshape(*words.shape[:-1], COLUMN_TILE).astype(bool)
    g = columns.block_size
    blocks = slice_from(columns.query_blocks, rows[0], rows.size, axis=0)
    position = blocks[:, None] * g + jnp.arange(g, dtype=jnp.int32)
    tokens = slice_from(columns.tokens, start, COLUMN_TILE, axis=-1)
    causal = tokens[:, :, None, None, :] <= position[:, :, None]
    return keys, values, keep[..., None, :] & causal


def _column_tiles(columns: Columns, rows: Array) -> tuple[Array | int, Array]:
    """Returns the first column tile that some query blocks may see, and one past the last."""
    limits = slice_rows(columns.limit, rows)
    end = (jnp.max(limits, initial=0) + COLUMN_TILE - 1) // COLUMN_TILE
    if columns.first is None:
        return 0, end
    first = jnp.where(limits > 0, slice_rows(columns.first, rows), columns.tokens.shape[-1])
    return jnp.min(first // COLUMN_TILE), end
