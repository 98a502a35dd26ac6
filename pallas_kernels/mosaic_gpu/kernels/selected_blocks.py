"""Hopper kernel that lists the key blocks that new tokens select, by the weights of blocks."""

# pyright: reportPrivateImportUsage=false
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf, vector

from pallas_kernels.mosaic_gpu.common import (
    COLUMN_LAYOUT,
    EDGE,
    LOG2E,
    ROW_LAYOUT,
    ROWS,
    columns_to_tile,
    full,
    iota,
    rows_to_tile,
)
from pallas_kernels.mosaic_gpu.interpreter import load_rows_of

_WIDTHS = 8, 16, 24  # blocks in each of the 64 rows of a chunk
_PARAMS = plgpu.CompilerParams(
    approx_math=True,
    unsafe_no_auto_barriers=True,
    reduction_scratch_bytes=2048,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
)


def padded_blocks(num_blocks: int) -> int:
    """The number of blocks that weights have room for."""
    size = ROWS * _width(num_blocks)
    return -(-num_blocks // size) * size


def _width(num_blocks: int) -> int:
    return next((x for x in _WIDTHS if ROWS * x >= num_blocks), _WIDTHS[-1])


@functools.partial(jax.jit, static_argnames=("group", "interpret"))  # traced once for all layers
def selected_blocks_kernel(
    weights: Array, totals: Array, group: int, forced: Array, least: Array, interpret: Any = False
) -> tuple[Array, Array]:
    """Implements `selected_blocks`, with weights of `padded_blocks(NB)` blocks.

    One warpgroup per sequence and key/value head passes chunks of the blocks, sums the masses of
    heads, and counts the selected blocks before each one.
    """
    batch, kv_heads, padded, num_rows = weights.shape
    num_blocks, interpreted = forced.shape[1], bool(interpret)
    width = _width(num_blocks)
    chunk, num_chunks = ROWS * width, padded // (ROWS * width)
    first_heads, wgmma = range(0, group, EDGE), plgpu.Layout.WGMMA
    padding = (0, 0), (0, padded - num_blocks)
    flags = jnp.pad(forced.astype(jnp.int32), padding, constant_values=-1)
    shape = batch, padded // width, width
    flags = jnp.broadcast_to(flags.reshape(-1, *shape[1:]), shape)
    least = jnp.broadcast_to(least, batch)

    def selected_blocks(
        weights: Any, totals: Any, flags: Any, least: Any, lists: Any, counts: Any, smem: Any
    ) -> None:
        block = lax.axis_index("block")
        entry, head = lax.div(block, kv_heads), lax.rem(block, kv_heads)
        smallest = least[entry]

        def total_of(heads: int) -> Array:
            """The logarithms of the sums of eight heads over all parts."""
            own = totals.at[entry, head, :, pl.ds(heads, EDGE)]
            tile = plgpu.load(own, layout=wgmma, optimized=False)
            peak = tile.max(axis=0)
            peak = jnp.where(peak > -jnp.inf, peak, 0.0)
            terms = jnp.exp2(tile - columns_to_tile(peak, tile))
            total = terms.sum(axis=0)
            return jnp.where(total > 0.0, peak + jnp.log(total) * LOG2E, 0.0)

        def read(number: Array) -> tuple[list[Array], Array]:
            """The weights of a chunk, for eight heads at a time, and its flags."""
            number = jnp.minimum(number, num_chunks - 1)
            blocks, rows = pl.ds(number * chunk, chunk), pl.ds(number * ROWS, ROWS)
            sources = [weights.at[entry, head, blocks, pl.ds(x, EDGE)] for x in first_heads]
            tiles = [plgpu.load(x, layout=wgmma, optimized=False) for x in sources]
            return tiles, plgpu.load(flags.at[entry, rows], layout=wgmma, optimized=False)

        start = read(jnp.int32(0))
        found = [total_of(heads) for heads in first_heads]

        def select(number: Array, carry: Any) -> Any:
            before, (tiles, flag) = carry
            following = read(number + 1)  # read early, to hide the latency
            mass = full((chunk,), 0.0, ROW_LAYOUT)
            for first, weight, total in zip(first_heads, tiles, found, strict=True):
                share = jnp.exp2(weight - columns_to_tile(total, weight))
                share = jnp.where(iota(weight, 1) + first < group, share, 0.0)
                mass += share.sum(axis=1)
            smem["mass"][...] = mass * (1 / group)
            plgpu.commit_smem()
            tile = load_rows_of(smem["mass"], 0, (ROWS, width), interpreted)
            kept = (flag > 0) | ((flag == 0) & (tile >= smallest))
            bit = jnp.int32(1) << iota(flag, 1)
            word = jnp.where(kept, bit, 0).sum(axis=1)
            smem["counts"][...] = _ones(word)
            plgpu.commit_smem()
            of_rows = plgpu.load(smem["counts"], layout=COLUMN_LAYOUT, optimized=False)
            square = columns_to_tile(of_rows, full((ROWS, ROWS), 0.0, plgpu.Layout.WGMMA))
            earlier = jnp.where(iota(square, 1) < iota(square, 0), square, 0).sum(axis=1)
            place = rows_to_tile(before + earlier, flag) + _ones(
                rows_to_tile(word, flag) & (bit - 1)
            )
            index = number * chunk + iota(flag, 0) * width + iota(flag, 1)
            place = jnp.where(kept, place, -1)
            _scatter(lists.at[entry, head], place, index, interpreted)
            return before + square.sum(axis=1), following

        zeros = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.int32), ROW_LAYOUT)
        count, _ = lax.fori_loop(0, num_chunks, select, (zeros, start))
        plgpu.commit_smem()  # other warps may still read the counts of rows
        smem["counts"][...] = count
        plgpu.commit_smem()
        counts[entry, head] = smem["counts"][0]

    run = plgpu.kernel(
        selected_blocks,
        out_type=[
            jax.ShapeDtypeStruct((batch, kv_heads, num_blocks), jnp.int32),
            jax.ShapeDtypeStruct((batch, kv_heads), jnp.int32),
        ],
        scratch_types=[
            {"mass": plgpu.SMEM((chunk,), jnp.float32), "counts": plgpu.SMEM((ROWS,), jnp.int32)}
        ],
        grid=(batch * kv_heads,),
        grid_names=("block",),
        compiler_params=_PARAMS,
        interpret=interpret,
    )
    return run(weights, totals, flags, least)


def _ones(words: Array) -> Array:
    """The number of ones among the bits of non-negative integers."""
    words -= (words >> 1) & 0x55555555
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    words += words >> 8
    return (words + (words >> 16)) & 0x3F


def _scatter(target: Any, places: Array, values: Array, interpreted: bool) -> None:
    """Writes values to those places of one-dimensional global memory that are not negative."""
    if interpreted:
        beyond = jnp.where(places < 0, target.shape[0], places)
        target[...] = target[...].at[beyond].set(values, mode="drop")
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, plgpu.Layout.WGMMA))
    def scatter(_: Any, target: Any, places: Any, values: Any) -> None:
        zero = arith.constant(ir.IntegerType.get_signless(32), 0)
        for place, value in zip(places.registers.flat, values.registers.flat, strict=True):
            for lane in range(2):
                at = vector.extract(place, [], [lane])
                if_kept = scf.IfOp(arith.cmpi(arith.CmpIPredicate.sge, at, zero))
                with ir.InsertionPoint(if_kept.then_block):
                    index = arith.index_cast(ir.IndexType.get(), at)
                    memref.store(vector.extract(value, [], [lane]), target, [index])
                    scf.yield_([])

    cast(Any, scatter)(target, places, values)
