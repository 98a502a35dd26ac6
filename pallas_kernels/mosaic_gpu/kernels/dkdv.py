"""Hopper backward kernel for dk and dv of blocks and gathered columns; runs before the one for dq.

A thread block owns 128 keys and iterates over the query blocks that see them, in a fixed order.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.interface import BackwardCall
from pallas_kernels.mosaic_gpu.common import (
    COLUMN_LAYOUT,
    LOG2E,
    ROWS,
    TILE,
    WARPGROUPS,
    BackwardOperands,
    Config,
    gathered_columns,
    launch,
)
from pallas_kernels.mosaic_gpu.interpreter import (
    AddProduct,
    accumulate_keys,
    key_scratch,
    product_plus,
)
from pallas_kernels.mosaic_gpu.key_walk import KeyWalk
from pallas_kernels.mosaic_gpu.masks import KeyMask, add_bias
from pallas_kernels.mosaic_gpu.query_stream import QueryStream, key_barriers, key_memory
from pallas_kernels.work.items import KeyItem, read
from pallas_kernels.work.key_work import PARTS, KeyWork, join_parts

_STEP = 64  # queries per step
_ROW_OPERANDS = ("base", "minus_delta")


def dkdv_kernel(
    call: BackwardCall, operands: BackwardOperands, config: Config, interpret: Any
) -> tuple[Any, Any]:
    """Returns fp32 dk, dv, summed over the query heads of a group, and those of columns or None.

    dv = P^T dO, dk = scale * dS^T Q with dS = P * (dP - delta). If the call returns complete
    gradients, each pair is an array [2, ...].
    """
    columns, scale, one_array = gathered_columns(call), call.scale, call.key_dtype is not None
    work: KeyWork = call.plan.work.keys
    q, k, v, dout, base, delta = operands
    head_dim, stages, interpreted = q.shape[-1], config.stages, bool(interpret)
    has_columns = columns is not None
    heavy = work.heavy
    has_parts = heavy is not None
    shapes = {"": k.shape}
    if has_columns:
        shapes["c"] = columns.k.shape
    if has_parts:
        in_parts = heavy.shape[-1] * PARTS * TILE
        shapes["p"] = k.shape[0], in_parts, *k.shape[2:]
    names, leading = (("dkv",), (2,)) if one_array else (("dk", "dv"), ())
    outputs = {
        name + suffix: jax.ShapeDtypeStruct((*leading, *shape), jnp.float32)
        for suffix, shape in shapes.items()
        for name in names
    }

    def attention_dkdv(refs):
        if one_array:
            for suffix in shapes:
                pair = refs["dkv" + suffix]
                refs |= {"dk" + suffix: pair.at[0], "dv" + suffix: pair.at[1]}
        smem, bars = refs["smem"], refs["bars"]
        warpgroup = lax.axis_index("wg")

        # One item per thread block: items differ so much in length that the hardware's scheduling,
        # longest first, balances better than any fixed assignment.
        it = read(KeyItem, refs["items"], lax.axis_index("block"))
        walk = KeyWalk(refs, it, work, _STEP)

        def memory_warpgroup():
            plgpu.set_max_registers(config.memory_registers, action="decrease")
            stream = QueryStream(refs, smem, bars, _ROW_OPERANDS)
            stream.drain(walk.load_all(stream))

        def compute_warpgroup():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            steps = _Steps(smem, bars, warpgroup, stages, scale * LOG2E, interpreted)
            plgpu.barrier_wait(bars["keys_full"])
            dk, dv, end = accumulate_keys(
                smem,
                warpgroup,
                interpreted,
                lambda add: walk.run_all(warpgroup, functools.partial(steps.run, add)),
            )
            steps.release(end - 1)

            def store(suffix, block):
                rows = pl.ds(block * TILE + warpgroup * ROWS, ROWS)
                refs["dk" + suffix].at[it.batch, rows, it.head][...] = dk * scale
                refs["dv" + suffix].at[it.batch, rows, it.head][...] = dv

            if len(shapes) == 1:
                store("", it.block)
            else:
                pl.when(it.blocks)(lambda: store("", it.block))
            if has_columns:
                pl.when(it.columns)(lambda: store("c", it.block))
            if has_parts:
                pl.when(it.part)(lambda: store("p", it.full_row))

        pl.when(warpgroup == WARPGROUPS)(memory_warpgroup)
        pl.when(warpgroup < WARPGROUPS)(compute_warpgroup)

    smem = key_memory(stages, _STEP, head_dim, q.dtype, _ROW_OPERANDS)
    if interpreted:
        smem |= key_scratch(_STEP, head_dim, q.dtype)
    inputs = dict(q=q, k=k, v=v, dout=dout, base=base, minus_delta=-delta)
    inputs |= work.operands | (columns.operands if has_columns else {})
    bars = key_barriers(stages)
    num_blocks = work.items.shape[0]
    results = launch(attention_dkdv, inputs, outputs, smem, bars, num_blocks, interpret)

    def of(suffix):
        found = tuple(results[name + suffix] for name in names)
        return found[0] if one_array else found

    keys = of("")
    if has_parts:
        keys = jax.tree.map(functools.partial(join_parts, heavy), keys, of("p"))
    return keys, of("c") if has_columns else None


@dataclasses.dataclass(frozen=True)
class _Steps:
    """The steps of one compute warpgroup, which owns half of a thread block's keys."""

    smem: dict[str, Any]
    bars: dict[str, Any]
    warpgroup: Array
    stages: int
    log2_scale: float
    interpreted: bool

    def release(self, step: Array) -> None:
        @pl.when(step >= 0)
        def _() -> None:
            plgpu.barrier_arrive(self.bars["free"].at[lax.rem(step, self.stages)])

    def run(self, add: AddProduct, step: Array, mask: KeyMask) -> None:
        """Adds the gradients from 64 queries; its last products overlap with the next step's."""
        smem, slot = self.smem, lax.rem(step, self.stages)
        own = pl.ds(self.warpgroup * ROWS, ROWS)
        q_tile, dout_tile = smem["q"].at[slot], smem["dout"].at[slot]
        plgpu.barrier_wait(self.bars["full"].at[slot])

        def columns(name: str) -> Array:
            values = plgpu.load(smem[name].at[slot], layout=COLUMN_LAYOUT)
            return lax.broadcast_in_dim(values, (ROWS, _STEP), [1])

        def product_from(name: str, keys: Any, tile: Any) -> Array:
            """Starts the accumulator from values that would otherwise be subtracted per element."""
            return product_plus(
                lambda: columns(name), keys, tile.T, (ROWS, _STEP), self.interpreted
            )

        logits = product_from("base", smem["k"].at[own], q_tile)
        # The products of the previous step are older than this one's.
        self.release(step - 1)
        logits, bias = mask.apply(logits)
        p = jnp.exp2(add_bias(logits * self.log2_scale, bias))
        add("dv", p.astype(smem["k"].dtype), dout_tile)
        dp = product_from("minus_delta", smem["v"].at[own], dout_tile)
        add("dk", (p * dp).astype(smem["k"].dtype), q_tile)
