"""Pieces that the kernels share, most of them by forward and dq: streaming keys, and masks.

A row kernel takes one block of 128 queries of one head (an item of the work list), split over
two compute warpgroups of 64 rows, and walks its list of key blocks, then its tiles of gathered
columns. A third warpgroup only issues copies.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

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
from pallas_kernels.tiles import VerticalColumns

LOG2E = math.log2(math.e)
ROWS = 64  # rows of one compute warpgroup: the M of one wgmma
WARPGROUPS = 2  # compute warpgroups of a thread block
TILE = 128  # keys of one tile, and queries of one block
WORD = 32  # columns of one word of the keep mask
ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)  # a value per row of a wgmma tile
COLUMN_LAYOUT = plgpu.Layout.WGMMA.reduce(0)  # a value per column
COLUMN_NAMES = ["kc", "vc", "keep", "tokens", "query_blocks"]  # what `column_operands` gives

# Barriers are placed by hand: every region of shared memory has one kind of writer, and readers
# announce the end of their reading. Reductions along rows stay within four lanes, so they need
# no shared memory.
COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
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


def operand_names(work: WorkList, verticals: VerticalColumns | None) -> list[str]:
    """Names of the operands of `operands`, in order."""
    names = ["items", "lists", "diagonal"]
    if work.run_first is not None:
        names += ["run_first", "run_last"]
    return names + (COLUMN_NAMES if verticals is not None else [])


def operands(work: WorkList, verticals: VerticalColumns | None) -> list[Array]:
    """The arrays that say what to walk, as kernel operands."""
    arrays = [work.items, work.lists, work.diagonal]
    if work.run_first is not None:
        arrays += [work.run_first, work.run_last]
    return arrays + (column_operands(verticals) if verticals is not None else [])


def column_operands(verticals: VerticalColumns) -> list[Array]:
    """Gathered columns as kernel operands, by the names of COLUMN_NAMES."""
    keep = lax.bitcast_convert_type(verticals.keep, jnp.int32)
    return [verticals.k, verticals.v, keep, verticals.tokens, verticals.query_blocks]


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for 16-bit wgmma operands."""
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def stream_barriers(stages: int, has_columns: bool) -> dict[str, Any]:
    """Barriers of a ring of `stages` slots for keys (with their bias) and one for values."""
    full = plgpu.Barrier(num_barriers=stages)
    free = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages)
    bars = {"k_full": full, "v_full": full, "k_free": free, "v_free": free}
    if has_columns:
        bars["bias_full"] = full
    return bars


def stream_memory(
    stages: int, head_dim: int, dtype: Any, has_columns: bool
) -> dict[str, Any]:
    """Shared memory of the two rings."""
    smem = {name: tiled((stages, TILE, head_dim), dtype) for name in ("k", "v")}
    if has_columns:
        smem["bias"] = plgpu.SMEM((stages, TILE), jnp.float32)
    return smem


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
        if self.listed:  # a list ascends: its last entry may be the diagonal
            before = it.tiles - one
            parts = [(0, before, Mask()), (before, it.tiles, diagonal)]
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


def keep_bias(words: list[Array], index: Array) -> Array:
    """0 where bit `index` of the concatenated 32-bit words is on, else -inf."""
    word = jnp.zeros_like(index)
    for part, bits in enumerate(words):
        word = jnp.where(index >= WORD * part, bits, word)
    bit = lax.shift_right_logical(word, index & (WORD - 1)) & 1
    return jnp.where(bit == 1, 0.0, -jnp.inf)


class Producer:
    """The copying side: streams the keys and values of items through shared memory.

    With `lag`, values follow keys one step behind: the order in which the forward kernel uses
    them. Each completion of a barrier is awaited, the last ones by `drain`.
    """

    def __init__(
        self, walk: Walk, smem: dict[str, Any], bars: dict[str, Any], stages: int, lag: bool
    ):
        self.walk, self.smem, self.bars = walk, smem, bars
        self.stages, self.lag = stages, lag

    def _load(self, name: str, step: Array, source: Any) -> None:
        slot = lax.rem(step, self.stages)

        @pl.when(step >= self.stages)
        def _() -> None:
            plgpu.barrier_wait(self.bars[f"{name}_free"].at[slot])

        plgpu.copy_gmem_to_smem(
            source, self.smem[name].at[slot], self.bars[f"{name}_full"].at[slot]
        )

    def load_item(self, it: Item, group: int, step: Array) -> Array:
        """Loads all tiles of an item; `step` counts tiles since the start of the kernel."""
        refs, walk = self.walk.refs, self.walk
        kv_head = lax.div(it.head, group)

        def tile(name: str, number: Array, head: Array) -> Any:
            return refs[name].at[it.batch, pl.ds(number * TILE, TILE), head]

        def load_values(s: Array, number: Array) -> None:
            self._load("v", step + s, tile("v", number, kv_head))

        def load_run(number: Array | int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            """Loads the blocks of a run, of which the first is the item's step `begin`."""
            begin, previous = carry
            first, count = walk.run(it, number)

            def load_block(s: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
                previous, number = carry
                self._load("k", step + begin + s, tile("k", number, kv_head))
                if self.lag:
                    pl.when(begin + s > 0)(lambda: load_values(begin + s - 1, previous))
                else:
                    load_values(begin + s, number)
                # The next list entry is read ahead: its latency hides behind the waits.
                following = walk.listed_block(it, first + lax.min(s + 1, count - 1))
                return number, following

            start = lax.cond(count > 0, lambda: walk.listed_block(it, first), lambda: previous)
            last, _ = lax.fori_loop(0, count, load_block, (previous, start))
            return begin + count, last

        if walk.runs is None:
            _, last = load_run(0, (0, jnp.int32(0)))
        else:
            _, last = lax.fori_loop(0, walk.runs, load_run, (jnp.int32(0), jnp.int32(0)))
        if self.lag:
            pl.when(it.tiles > 0)(lambda: load_values(it.tiles - 1, last))
        if walk.has_columns:

            def load_column_values(s: Array) -> None:
                self._load("v", step + it.tiles + s, tile("vc", s, it.head))

            def read_words(s: Array) -> list[Array]:
                first = s * (TILE // WORD)
                keep = refs["keep"]
                return [
                    keep[it.batch, it.head, it.block, first + part] for part in range(TILE // WORD)
                ]

            def load_columns(s: Array, words: list[Array]) -> list[Array]:
                # The next tile's words are read ahead, to hide the latency.
                following = read_words(lax.min(s + 1, it.column_tiles - 1))
                self._load("k", step + it.tiles + s, tile("kc", s, it.head))
                # The slot of the keys is free, and with it that of their bias.
                slot = lax.rem(step + it.tiles + s, self.stages)
                index = lax.iota(jnp.int32, TILE)
                self.smem["bias"][slot] = keep_bias(words, index)
                plgpu.barrier_arrive(self.bars["bias_full"].at[slot])
                if self.lag:
                    pl.when(s > 0)(lambda: load_column_values(s - 1))
                else:
                    load_column_values(s)
                return following

            @pl.when(it.column_tiles > 0)
            def _() -> None:
                lax.fori_loop(0, it.column_tiles, load_columns, read_words(jnp.int32(0)))

            if self.lag:
                pl.when(it.column_tiles > 0)(lambda: load_column_values(it.column_tiles - 1))
        return step + it.steps

    def drain(self, steps: Array) -> None:
        """Awaits the release of the last slots."""
        await_last((self.bars["k_free"], self.bars["v_free"]), steps, self.stages)


def await_last(barriers: Sequence[Any], steps: Array, slots: int) -> None:
    """Waits at barriers with one slot a step for the last `slots` of `steps` steps, or for all."""

    def wait(step: Array, _: None) -> None:
        slot = lax.rem(step, slots)
        for barrier in barriers:
            plgpu.barrier_wait(barrier.at[slot])

    lax.fori_loop(lax.max(0, steps - slots), steps, wait, None)


def launch(
    kernel: Callable[..., None], out_type: Any, scratch: list[Any], num_blocks: int,
    interpret: Any, memory_warpgroups: int = 1,
) -> Callable[..., Any]:
    """A kernel over thread blocks (axis "block") of compute and copying warpgroups ("wg").

    Its results come through a barrier. Where a `lax.scan` stacks them (as the residuals of a layer,
    say), XLA would otherwise run a second copy of the kernel that writes into the stack, beside
    the one whose results are used (its pass "dynamic-slice-fusion", jaxlib 0.11.2).
    """
    run = plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=scratch,
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS + memory_warpgroups,
        thread_name="wg",
        compiler_params=COMPILER_PARAMS,
        interpret=interpret,
    )
    return lambda *args: lax.optimization_barrier(run(*args))


def full(shape: tuple[int, ...], value: float, layout: Any) -> Array:
    """A constant in the layout of a wgmma tile or of one of its edges."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def iota(tile: Array, axis: int) -> Array:
    """Row or column numbers of a wgmma tile."""
    return plgpu.broadcasted_iota(jnp.int32, tile.shape, axis, layout=plgpu.Layout.WGMMA)


def product(a: Any, b: Any, shape: tuple[int, int]) -> Array:
    """a b, awaited."""

    def run(ref: Any) -> Array:
        plgpu.wgmma(ref, a, b)
        return ref[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def product_plus(
    base: Callable[[], Array], a: Any, b: Any, shape: tuple[int, int], interpreted: bool
) -> Array:
    """base + a b, with the base as the accumulator's first value."""
    acc = plgpu.ACC(shape, jnp.float32)

    def product(ref: Any) -> Array:
        if not interpreted:
            ref[...] = base()
        plgpu.wgmma(ref, a, b)
        return ref[...]

    result = pl.run_scoped(product, acc)
    return result + base() if interpreted else result


def rows_to_tile(x: Array, tile: Array) -> Array:
    """A value per row, for every column of a tile."""
    return lax.broadcast_in_dim(x, tile.shape, [0])


def columns_to_tile(x: Array, tile: Array) -> Array:
    """A value per column, for every row of a tile."""
    return lax.broadcast_in_dim(x, tile.shape, [1])


def load_rows(ref: Any) -> Array:
    """A value per row, from global memory."""
    return plgpu.load(ref, layout=ROW_LAYOUT, optimized=False)
