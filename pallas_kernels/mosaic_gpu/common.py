"""Common parts of the kernels: constants, layouts, products and other operations on a tile."""

# pyright: reportPrivateImportUsage=false
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.interface import BackwardCall, ForwardCall
from pallas_kernels.tiles import Columns

LOG2E = math.log2(math.e)
ROWS = 64  # rows of one compute warpgroup: the M dimension of a wgmma
WARPGROUPS = 2  # compute warpgroups per thread block
TILE = 128  # keys of a tile, and queries of a block
WORD = 32  # columns per word of the keep mask
_SWIZZLE_BYTES = 128  # of a row of a tile in shared memory
ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)  # one value per row of a wgmma tile
COLUMN_LAYOUT = plgpu.Layout.WGMMA.reduce(0)  # one value per column
EDGE = 8  # columns left by a fold: a row is spread over four threads, two columns each

# Barriers are placed by hand: every region of shared memory has one kind of writer, and readers
# signal when they have finished reading. Row reductions stay within four lanes, so they need no
# shared memory.
COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning of a kernel."""

    stages: int = 2  # tiles of keys and values, or steps of queries, in flight
    value_stages: int | None = None  # tiles of values, if not as many
    keys: int = TILE  # of a tile of keys; smaller ones are parts of a block
    compute_registers: int = 240
    memory_registers: int = 24


class GatheredColumns(NamedTuple):
    """Gathered columns with their keys and values, [B, Mv, Hq, D]."""

    k: Array
    v: Array
    seen: Columns

    @property
    def operands(self) -> dict[str, Array]:
        seen = self.seen
        keep = lax.bitcast_convert_type(seen.keep, jnp.int32)
        arrays = {"kc": self.k, "vc": self.v, "keep": keep, "tokens": seen.tokens}
        return arrays | {"query_blocks": seen.query_blocks}


def gathered_columns(call: ForwardCall | BackwardCall) -> GatheredColumns | None:
    if call.column_kv is None or call.plan.columns is None:
        return None
    return GatheredColumns(*call.column_kv, call.plan.columns)


class BackwardOperands(NamedTuple):
    q: Array  # [B, nq, Hq, D], as dout
    k: Array  # [B, nk, Hk, D], as v
    v: Array
    dout: Array
    base: Array  # fp32 [B, Hq, nq], -lse / scale of the rows' final lse; -inf for empty rows
    delta: Array  # fp32 [B, Hq, nq]


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for wgmma operands of 8 or 16 bits."""
    size = jnp.dtype(dtype).itemsize
    width = min(_SWIZZLE_BYTES // size, shape[-1])
    transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width * size))  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def block_of(step: Array, parts: int) -> tuple[Array, Array | int]:
    """Returns the block of a step, and its first key there, where blocks have `parts` steps."""
    if parts == 1:
        return step, 0
    return lax.div(step, parts), lax.rem(step, parts) * (TILE // parts)


def await_last(barriers: Sequence[Any], steps: Array, slots: int) -> None:
    """Waits at barriers with one slot per step for the last `slots` of `steps` steps, or all."""

    def wait(step: Array, _: None) -> None:
        slot = lax.rem(step, slots)
        for barrier in barriers:
            plgpu.barrier_wait(barrier.at[slot])

    lax.fori_loop(lax.max(0, steps - slots), steps, wait, None)


def launch(
    kernel: Callable[[dict[str, Any]], None],
    inputs: dict[str, Array],
    outputs: dict[str, jax.ShapeDtypeStruct],
    smem: dict[str, Any],
    bars: dict[str, Any],
    num_blocks: int,
    interpret: Any,
    warpgroups: int = WARPGROUPS,
    memory_warpgroups: int = 1,
) -> dict[str, Array]:
    """Runs a kernel(references by name) over thread blocks ("block") of warpgroups ("wg")."""
    names = [*inputs, *outputs, "smem", "bars"]

    def body(*arguments: Any) -> None:
        kernel(dict(zip(names, arguments, strict=True)))

    body.__name__ = kernel.__name__
    run = plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=[smem, bars],
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=warpgroups + memory_warpgroups,
        thread_name="wg",
        compiler_params=COMPILER_PARAMS,
        interpret=interpret,
    )
    # The barrier keeps XLA (pass "dynamic-slice-fusion", jaxlib 0.11.2) from running a second copy
    # of the kernel if a `lax.scan` stacks its results.
    results = lax.optimization_barrier(run(*inputs.values()))
    return dict(zip(outputs, results, strict=True))


def full(shape: tuple[int, ...], value: float, layout: Any) -> Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def iota(tile: Array, axis: int) -> Array:
    return plgpu.broadcasted_iota(jnp.int32, tile.shape, axis, layout=plgpu.Layout.WGMMA)


def product(a: Any, b: Any, shape: tuple[int, int], dtype: Any = jnp.float32) -> Array:
    def run(ref: Any) -> Array:
        plgpu.wgmma(ref, a, b)
        return ref[...]

    return pl.run_scoped(run, plgpu.ACC(shape, dtype))


def rows_to_tile(x: Array, tile: Array) -> Array:
    return lax.broadcast_in_dim(x, tile.shape, [0])


def columns_to_tile(x: Array, tile: Array) -> Array:
    return lax.broadcast_in_dim(x, tile.shape, [1])


def load_rows(ref: Any) -> Array:
    return plgpu.load(ref, layout=ROW_LAYOUT, optimized=False)


def store_rows(values: Array, target: Any, q_tile: Any, wait: bool = True) -> None:
    """Writes 64 rows to global memory, if possible through that of queries no longer needed.

    Without `wait`, the caller awaits the copy before others use this memory.
    """
    if values.dtype != q_tile.dtype:
        target[...] = values
        return
    q_tile[...] = values
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_tile, target)
    if wait:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def partial_sums(value: float) -> Array:
    """Fills [64, 8] with a value, in the shape of `fold`'s result for a tile."""
    return full((ROWS, EDGE), value, plgpu.Layout.WGMMA)


def fold(combine: Any, tile: Array) -> Array:
    """Reduces a tile [64, n] to eight columns, by halves: a short chain without exchanges."""
    while tile.shape[1] > EDGE:
        half = tile.shape[1] // 2
        tile = combine(tile[:, :half], tile[:, half:])
    return tile
