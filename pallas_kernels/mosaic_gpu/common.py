"""Pieces that the kernels share: constants, layouts, products and other steps of a tile."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tiles import Columns

LOG2E = math.log2(math.e)
ROWS = 64  # rows of one compute warpgroup: the M of one wgmma
WARPGROUPS = 2  # compute warpgroups of a thread block
TILE = 128  # keys of one tile, and queries of one block
WORD = 32  # columns of one word of the keep mask
ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)  # a value per row of a wgmma tile
COLUMN_LAYOUT = plgpu.Layout.WGMMA.reduce(0)  # a value per column
EDGE = 8  # columns that a fold leaves: a row's lie in four threads, two in each
COLUMN_NAMES = ["kc", "vc", "keep", "tokens", "query_blocks"]  # of `GatheredColumns.operands`

# Barriers are placed by hand: every region of shared memory has one kind of writer, and readers
# signal when they have finished reading. Reductions along rows stay within four lanes, so they need
# no shared memory.
COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
)


class GatheredColumns(NamedTuple):
    """Gathered columns with their keys and values, [B, Mv, Hq, D]."""

    k: Array
    v: Array
    seen: Columns

    @property
    def operands(self) -> list[Array]:
        """As kernel operands, by the names of COLUMN_NAMES."""
        keep = lax.bitcast_convert_type(self.seen.keep, jnp.int32)
        return [self.k, self.v, keep, self.seen.tokens, self.seen.query_blocks]


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for 16-bit wgmma operands."""
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def await_last(barriers: Sequence[Any], steps: Array, slots: int) -> None:
    """Waits at barriers with one slot a step for the last `slots` of `steps` steps, or for all."""

    def wait(step: Array, _: None) -> None:
        slot = lax.rem(step, slots)
        for barrier in barriers:
            plgpu.barrier_wait(barrier.at[slot])

    lax.fori_loop(lax.max(0, steps - slots), steps, wait, None)


def launch(
    kernel: Callable[..., None], out_type: Any, scratch: list[Any], num_blocks: int,
    interpret: Any, warpgroups: int = WARPGROUPS, memory_warpgroups: int = 1,
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
        num_threads=warpgroups + memory_warpgroups,
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


def rows_to_tile(x: Array, tile: Array) -> Array:
    """A value per row, for every column of a tile."""
    return lax.broadcast_in_dim(x, tile.shape, [0])


def columns_to_tile(x: Array, tile: Array) -> Array:
    """A value per column, for every row of a tile."""
    return lax.broadcast_in_dim(x, tile.shape, [1])


def load_rows(ref: Any) -> Array:
    """A value per row, from global memory."""
    return plgpu.load(ref, layout=ROW_LAYOUT, optimized=False)


def partial_sums(value: float) -> Array:
    """[64, 8] of a value: what `fold` gives for a tile."""
    return full((ROWS, EDGE), value, plgpu.Layout.WGMMA)


def fold(combine: Any, tile: Array) -> Array:
    """Combines the columns of a tile [64, n] into eight, by halves: a short chain, no exchange."""
    while tile.shape[1] > EDGE:
        half = tile.shape[1] // 2
        tile = combine(tile[:, :half], tile[:, half:])
    return tile
