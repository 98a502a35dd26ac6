"""What the row kernels, forward and dq, walk: items of a work list, and the masks of their tiles.

A row kernel takes one block of 128 queries of one head (an item of the work list), split over
two compute warpgroups of 64 rows, and walks its list of key blocks, then its tiles of gathered
columns. A third warpgroup only issues copies.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.common import (
    COLUMN_LAYOUT,
    COLUMN_NAMES,
    ROWS,
    TILE,
    GatheredColumns,
    columns_to_tile,
    iota,
)
from pallas_kernels.mosaic_gpu.schedule import (
    BATCH,
    BLOCK,
    COLUMN_TILES,
    FIRST,
    HEAD,
    PAST_TILES,
    TILES,
    WorkList,
)


class Item:
    """One item of a row work list, read from global memory."""

    def __init__(self, items: Any, n: Array):
        self.batch = items[n, BATCH]
        self.head = items[n, HEAD]
        self.block = items[n, BLOCK]
        self.first = items[n, FIRST]
        self.tiles = items[n, TILES]
        self.column_tiles = items[n, COLUMN_TILES]
        self.past_tiles = items[n, PAST_TILES]

    @property
    def steps(self) -> Array:
        """Tiles of both kinds."""
        return self.tiles + self.column_tiles


def operand_names(work: WorkList, columns: GatheredColumns | None) -> list[str]:
    """Names of the operands of `operands`, in order."""
    names = ["items", "lists", "diagonal"]
    if work.run_first is not None:
        names += ["run_first", "run_last"]
    return names + (COLUMN_NAMES if columns is not None else [])


def operands(work: WorkList, columns: GatheredColumns | None) -> list[Array]:
    """The arrays that say what to walk, as kernel operands."""
    arrays = [work.items, work.lists, work.diagonal]
    if work.run_first is not None:
        arrays += [work.run_first, work.run_last]
    return arrays + (columns.operands if columns is not None else [])


class Walk:
    """What the work list says of the tiles of an item."""

    def __init__(self, refs: dict[str, Any], work: WorkList, has_columns: bool):
        self.refs = refs
        self.listed = work.listed
        self.runs = None if work.run_first is None else work.run_first.shape[2]
        self.has_columns = has_columns

    def key_block(self, it: Item, s: Array) -> Array:
        """Key block of list entry s of an item, counted from its first one."""
        return self.listed_block(it, it.first + s)

    def listed_block(self, it: Item, entry: Array) -> Array:
        """Key block of an entry of the list that an item walks."""
        if self.listed:
            return self.refs["lists"][it.batch, it.head, it.block, entry]
        return it.block - self.refs["lists"][it.batch, it.head, entry]

    def run(self, it: Item, number: Array) -> tuple[Array, Array]:
        """First list entry and number of entries of a run of an item."""
        if self.runs is None:
            return it.first, it.tiles
        at = it.batch, it.head, number, it.block
        first = self.refs["run_first"][at]
        return first, self.refs["run_last"][at] - first

    def segments(self, it: Item, warpgroup: Array) -> list[tuple[Array, Array, "Mask"]]:
        """Runs of tiles that share a mask: (first step, one past the last, mask)."""
        one = lax.min(1, it.tiles)
        diagonal = DiagonalMask(self, it, warpgroup)
        parts = [(0, one, diagonal), (one, it.tiles, Mask())]
        if self.has_columns:
            past = it.tiles + it.past_tiles
            parts.append((it.tiles, past, ColumnMask(self, it, warpgroup, causal=False)))
            parts.append((past, it.steps, ColumnMask(self, it, warpgroup, causal=True)))
        return parts

    def first_masks(self, it: Item, warpgroup: Array) -> list["Mask"]:
        """Masks that suit the first tile of any item: as a listed block, as columns."""
        masks: list[Mask] = [DiagonalMask(self, it, warpgroup)]
        if self.has_columns:
            masks.append(ColumnMask(self, it, warpgroup, causal=True))
        return masks


class Mask:
    """Keeps every logit of a tile.

    `prepare` reads what the mask needs from global memory; called before the products are
    awaited, it hides the latency. `await_bias` and `bias` give what the logits' accumulator
    starts from. `apply` returns logits [64, n] with -inf where excluded; they belong to columns
    `column`, `column` + 1, ... of the tile (static).
    """

    def prepare(self, s: Array) -> Any:
        """What `apply` needs for step s."""
        del s

    def await_bias(self, bars: dict[str, Any], slot: Array) -> None:
        """Waits until the bias of a slot can be read."""

    def bias(self, smem: dict[str, Any], slot: Array, column: int, width: int) -> Array | None:
        """Additive mask [64, width] of a slot, or None for nothing."""
        del smem, slot, column, width
        return None

    def apply(self, prepared: Any, logits: Array, column: int = 0) -> Array:
        """Masked logits."""
        del prepared, column
        return logits


@dataclasses.dataclass(frozen=True)
class DiagonalMask(Mask):
    """Masks a tile that may lie on the causal diagonal; leaves any other as it is."""

    walk: Walk
    it: Item
    warpgroup: Array

    def prepare(self, s: Array) -> Array:
        """The first row of this warpgroup, shifted so far that every row passes off-diagonal."""
        offset = self.it.block - self.walk.key_block(self.it, s)
        shift = jnp.where(offset == self.walk.refs["diagonal"][0], 0, TILE)
        return self.warpgroup * ROWS + shift

    def apply(self, prepared: Array, logits: Array, column: int = 0) -> Array:
        """Masked logits."""
        passes = iota(logits, 0) + (prepared - column) >= iota(logits, 1)
        return jnp.where(passes, logits, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class ColumnMask(Mask):
    """Masks a tile of gathered columns by its keep bits and, with `causal`, by position.

    The producer expands the bits into a bias in shared memory.
    """

    walk: Walk
    it: Item
    warpgroup: Array
    causal: bool

    def prepare(self, s: Array) -> Array:
        """The number of the tile among the column tiles."""
        return s - self.it.tiles

    def await_bias(self, bars: dict[str, Any], slot: Array) -> None:
        """Waits until the bias of a slot can be read."""
        plgpu.barrier_wait(bars["bias_full"].at[slot])

    def bias(self, smem: dict[str, Any], slot: Array, column: int, width: int) -> Array:
        """Additive mask [64, width] of a slot."""
        values = plgpu.load(smem["bias"].at[slot, pl.ds(column, width)], layout=COLUMN_LAYOUT)
        return lax.broadcast_in_dim(values, (ROWS, width), [1])

    def apply(self, prepared: Array, logits: Array, column: int = 0) -> Array:
        """Masked logits."""
        if not self.causal:
            return logits
        refs, it, width = self.walk.refs, self.it, logits.shape[1]
        tokens = plgpu.load(
            refs["tokens"].at[it.batch, it.head, pl.ds(prepared * TILE + column, width)],
            layout=COLUMN_LAYOUT,
            optimized=False,
        )
        first_row = refs["query_blocks"][it.block] * TILE + self.warpgroup * ROWS
        passes = iota(logits, 0) >= columns_to_tile(tokens - first_row, logits)
        return jnp.where(passes, logits, -jnp.inf)
