"""Hopper kernel for decoding: attention of one token per sequence, split over its key blocks."""

# pyright: reportPrivateImportUsage=false
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode import DecodeCall, combine
from pallas_kernels.interface import Pair
from pallas_kernels.mosaic_gpu.common import (
    LOG2E,
    ROW_LAYOUT,
    ROWS,
    TILE,
    WARPGROUPS,
    await_last,
    columns_to_tile,
    fold,
    full,
    iota,
    launch,
    partial_sums,
    product,
    rows_to_tile,
    tiled,
)
from pallas_kernels.mosaic_gpu.device import multiprocessors
from pallas_kernels.mosaic_gpu.interpreter import add_product

_KEYS = 64  # of a tile
_HALVES = TILE // _KEYS
_SLOTS = 4  # of tiles, a multiple of the warpgroups: each has slots of its own
_ROWS_COPIED = 8
_COMBINED = 32  # components that a thread block combines


def decode_kernel(call: DecodeCall, interpret: Any = False) -> Pair:
    """Implements `decode`, with heads of up to 128 in groups of up to 64.

    The tiles of a key/value head are divided evenly between as many thread blocks as fit on the
    GPU. Its two compute warpgroups take turns, and write a partial result each; rows of a group
    that is smaller than a tile are zeros.
    """
    *arrays, scale = call
    return _decode(*arrays, scale=scale, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("scale", "interpret"))  # traced once for all layers
def _decode(
    q: Array,
    k: Array,
    v: Array,
    blocks: Array,
    counts: Array,
    seen: Array,
    *,
    scale: float,
    interpret: Any,
) -> Pair:
    batch, heads, dim = q.shape
    kv_heads, interpreted = k.shape[1], bool(interpret)
    group = heads // kv_heads
    copied = -(-group // _ROWS_COPIED) * _ROWS_COPIED
    parts = max(multiprocessors(interpret) // (batch * kv_heads), 1)
    rows = q.reshape(batch, kv_heads, group, dim)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, ROWS - group), (0, 0)))
    lists = jnp.broadcast_to(blocks, (batch, kv_heads, blocks.shape[-1]))
    counts = jnp.broadcast_to(counts, (batch, kv_heads))
    seen = jnp.broadcast_to(seen, (batch, *seen.shape[1:]))
    log2_scale = scale * LOG2E

    def attention_decode(refs: dict[str, Any]) -> None:
        smem, bars, warpgroup = refs["smem"], refs["bars"], lax.axis_index("wg")
        block = lax.axis_index("block")
        pair, part = lax.div(block, parts), lax.rem(block, parts)
        entry, head = lax.div(pair, kv_heads), lax.rem(pair, kv_heads)
        count = refs["counts"][entry, head] * _HALVES
        first = lax.div(count * part, parts)
        tiles = lax.div(count * (part + 1), parts) - first
        last = lax.max(count - 1, 0)

        def number(tile: Array) -> Array:
            """The block of a tile of the part; reads past the end see the last one."""
            return refs["blocks"][entry, head, lax.div(lax.min(first + tile, last), _HALVES)]

        def memory_warpgroup() -> None:
            plgpu.set_max_registers(24, action="decrease")
            plgpu.copy_gmem_to_smem(refs["q"].at[entry, head], smem["q"], bars["q"])

            def load(tile: Array, of_tile: Array) -> Array:
                following, slot = number(tile + 1), lax.rem(tile, _SLOTS)
                start = of_tile * TILE + lax.rem(first + tile, _HALVES) * _KEYS
                for name in ("k", "v"):
                    free, filled = (bars[f"{name}_{x}"].at[slot] for x in ("free", "full"))
                    pl.when(tile >= _SLOTS)(lambda free=free: plgpu.barrier_wait(free))
                    source = refs[name].at[entry, head, pl.ds(start, _KEYS)]
                    plgpu.copy_gmem_to_smem(source, smem[name].at[slot], filled)
                return following

            lax.fori_loop(0, tiles, load, number(jnp.int32(0)))
            await_last([bars["k_free"], bars["v_free"]], tiles, _SLOTS)

        def compute_warpgroup() -> None:
            plgpu.set_max_registers(240, action="increase")
            staging = smem["p"].at[warpgroup] if interpreted else None

            def limits(of_tile: Array) -> tuple[Array, Array]:
                return refs["seen"][entry, of_tile, 0], refs["seen"][entry, of_tile, 1]

            def attend(turn: Array, carry: Any) -> Any:
                acc, peak, total, following, (start, stop) = carry
                tile = turn * WARPGROUPS + warpgroup
                # What the next turns need is read now, to hide the latency.
                next_limits = limits(following)
                following = number(tile + 2 * WARPGROUPS)
                slot = lax.rem(tile, _SLOTS)
                plgpu.barrier_wait(bars["k_full"].at[slot])
                logits = product(smem["q"], smem["k"].at[slot].T, (ROWS, _KEYS))
                plgpu.barrier_arrive(bars["k_free"].at[slot])
                key = iota(logits, 1) + lax.rem(first + tile, _HALVES) * _KEYS
                logits = jnp.where((key >= start) & (key < stop), logits, -jnp.inf)
                new_peak = jnp.maximum(peak, fold(jnp.maximum, logits).max(axis=1))
                finite = jnp.where(new_peak > -jnp.inf, new_peak, 0.0)
                decay = jnp.exp2((peak - finite) * log2_scale)
                base = rows_to_tile(finite * log2_scale, logits)
                weights = jnp.exp2(logits * log2_scale - base)
                total = total * rows_to_tile(decay, total) + fold(jnp.add, weights)
                plgpu.barrier_wait(bars["v_full"].at[slot])
                acc = acc * rows_to_tile(decay, acc)
                own = weights.astype(k.dtype), smem["v"].at[slot]
                acc = add_product(acc, *own, interpreted=interpreted, staging=staging)
                plgpu.barrier_arrive(bars["v_free"].at[slot])
                return acc, new_peak, total, following, next_limits

            numbers = number(warpgroup), number(warpgroup + WARPGROUPS)
            acc = full((ROWS, dim), 0.0, plgpu.Layout.WGMMA)
            peak = full((ROWS,), -jnp.inf, ROW_LAYOUT)
            state = acc, peak, partial_sums(0.0), numbers[1], limits(numbers[0])
            plgpu.barrier_wait(bars["q"])
            turns = lax.div(tiles - warpgroup + WARPGROUPS - 1, WARPGROUPS)
            acc, peak, total, *_ = lax.fori_loop(0, turns, attend, state)
            total = total.sum(axis=1)
            some = total > 0.0
            total = jnp.where(some, total, 1.0)
            at = part * WARPGROUPS + warpgroup
            lse = jnp.where(some, peak * scale + jnp.log(total), -jnp.inf)
            refs["lse"].at[entry, head, at][...] = lse
            smem["out"].at[warpgroup][...] = acc * rows_to_tile(1.0 / total, acc)
            plgpu.commit_smem()
            source = smem["out"].at[warpgroup, pl.ds(0, copied)]
            plgpu.copy_smem_to_gmem(source, refs["out"].at[entry, head, at])
            plgpu.wait_smem_to_gmem(0)

        pl.when(warpgroup == WARPGROUPS)(memory_warpgroup)
        pl.when(warpgroup < WARPGROUPS)(compute_warpgroup)

    smem = {
        "q": tiled((ROWS, dim), q.dtype),
        "k": tiled((_SLOTS, _KEYS, dim), k.dtype),
        "v": tiled((_SLOTS, _KEYS, dim), k.dtype),
        "out": plgpu.SMEM((WARPGROUPS, ROWS, dim), jnp.float32),
    }
    if interpreted:
        smem["p"] = tiled((WARPGROUPS, ROWS, _KEYS), k.dtype)
    bars = {"q": plgpu.Barrier()}
    bars |= {
        f"{name}_{x}": plgpu.Barrier(num_barriers=_SLOTS) for name in "kv" for x in ("full", "free")
    }
    inputs = {"q": rows, "k": k, "v": v, "blocks": lists, "counts": counts, "seen": seen}
    partial = batch, kv_heads, parts * WARPGROUPS
    outputs = {
        "out": jax.ShapeDtypeStruct((*partial, copied, dim), jnp.float32),
        "lse": jax.ShapeDtypeStruct((*partial, ROWS), jnp.float32),
    }
    num_blocks = batch * kv_heads * parts
    results = launch(attention_decode, inputs, outputs, smem, bars, num_blocks, interpret)
    if parts * WARPGROUPS >= ROWS:
        return _combined(results["out"], results["lse"], group, interpret)
    out, lse = combine(results["out"][..., :group, :], results["lse"][..., :group], axis=2)
    return out.reshape(q.shape), lse.reshape(batch, heads)


def _combined(out: Array, lse: Array, group: int, interpret: Any) -> Pair:
    """Combines the P >= 64 parts of each head: out [B, Hk, P, .., D] and lse [B, Hk, P, 64].

    One warpgroup per head and slice of its components; the four programs that XLA makes of it take
    longer than attention to a few blocks.
    """
    batch, kv_heads, parts, _, dim = out.shape
    starts = [*range(0, parts - ROWS, ROWS), parts - ROWS]  # the last tile repeats some parts
    slices = dim // _COMBINED

    def combine_decoded(out: Any, lse: Any, whole: Any, whole_lse: Any) -> None:
        block = lax.axis_index("block")
        block, begin = lax.div(block, slices), lax.rem(block, slices) * _COMBINED
        pair, member = lax.div(block, group), lax.rem(block, group)
        entry, head = lax.div(pair, kv_heads), lax.rem(pair, kv_heads)
        components = pl.ds(begin, _COMBINED)
        zeros = full((ROWS, _COMBINED), 0.0, plgpu.Layout.WGMMA)
        tiles, values = [], []
        for number, start in enumerate(starts):
            rows = pl.ds(start, ROWS)
            own = lse.at[entry, head, rows, member]
            tile = rows_to_tile(plgpu.load(own, layout=ROW_LAYOUT, optimized=False), zeros)
            tiles.append(jnp.where(iota(tile, 0) + start >= number * ROWS, tile, -jnp.inf))
            source = out.at[entry, head, rows, member, components]
            values.append(plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False))
        peak = functools.reduce(jnp.maximum, tiles).max(axis=0)
        base = columns_to_tile(jnp.where(peak > -jnp.inf, peak, 0.0), zeros)
        acc = total = zeros
        for tile, value in zip(tiles, values, strict=True):
            share = jnp.exp2((tile - base) * LOG2E)
            acc, total = acc + share * value, total + share
        total, acc = total.sum(axis=0), acc.sum(axis=0)
        combined = acc / jnp.where(total > 0.0, total, 1.0)
        whole.at[entry, head, member, components][...] = combined
        whole_lse.at[entry, head, member, components][...] = peak + jnp.log(total)

    shape = jax.ShapeDtypeStruct((batch, kv_heads, group, dim), jnp.float32)
    run = plgpu.kernel(
        combine_decoded,
        out_type=[shape, shape],
        grid=(batch * kv_heads * group * slices,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    out, lse = run(out, lse)
    return out.reshape(batch, -1, dim), lse[..., 0].reshape(batch, -1)
