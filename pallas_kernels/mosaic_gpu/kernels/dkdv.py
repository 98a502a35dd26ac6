"""Hopper backward kernel for dk and dv of blocks and gathered columns; runs before the one for dq.

A thread block owns 128 keys and iterates over the query blocks that see them, in a fixed order.
With wider heads it owns 64 keys, half of an item: one warpgroup computes dv, the other one dk.
"""

import dataclasses
import functools
from collections.abc import Callable
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
    await_last,
    gathered_columns,
    launch,
    store_rows,
    tiled,
)
from pallas_kernels.mosaic_gpu.interpreter import (
    AddProduct,
    accumulate_keys,
    key_scratch,
    product_plus,
    with_accumulators,
)
from pallas_kernels.mosaic_gpu.key_walk import KeyWalk
from pallas_kernels.mosaic_gpu.masks import KeyMask, add_bias
from pallas_kernels.mosaic_gpu.query_stream import QueryStream, key_barriers, key_memory
from pallas_kernels.work.items import KeyItem, read
from pallas_kernels.work.key_work import PARTS, KeyWork, join_parts

_STEP = 64  # queries per step
_ROW_OPERANDS = ("base", "minus_delta")
_WEIGHTS = 2  # tiles of weights that wait for the warpgroup of dk


@dataclasses.dataclass(frozen=True)
class KeysConfig(Config):
    paired: bool = False  # dP starts next to S, and not once P is computed


def dkdv_kernel(
    call: BackwardCall, operands: BackwardOperands, config: KeysConfig, interpret: Any
) -> tuple[Any, Any]:
    """Returns dk, dv, summed over the query heads of a group, and fp32 ones of columns or None.

    dv = P^T dO, dk = scale * dS^T Q with dS = P * (dP - delta). Without columns, dk and dv have
    `call.key_dtype` if it is given. With both, each pair is one fp32 array [2, ...]: the caller
    adds the gradients of columns.
    """
    columns, scale = gathered_columns(call), call.scale
    work: KeyWork = call.plan.work.keys
    q, k, v, dout, base, delta = operands
    head_dim, stages, interpreted = q.shape[-1], config.stages, bool(interpret)
    wide = head_dim > TILE  # dk and dv of 128 keys do not fit in registers
    halves = 2 if wide else 1
    has_columns = columns is not None
    heavy = work.heavy
    has_parts = heavy is not None
    one_array = call.key_dtype is not None and has_columns
    # Gradients of columns and of parts are added later.
    key_dtype = jnp.float32 if has_columns or call.key_dtype is None else call.key_dtype
    dtypes = {"": key_dtype, "c": jnp.float32, "p": jnp.float32}
    shapes = {"": k.shape}
    if has_columns:
        shapes["c"] = columns.k.shape
    if has_parts:
        in_parts = heavy.shape[-1] * PARTS * TILE
        shapes["p"] = k.shape[0], in_parts, *k.shape[2:]
    names, leading = (("dkv",), (2,)) if one_array else (("dk", "dv"), ())
    outputs = {
        name + suffix: jax.ShapeDtypeStruct((*leading, *shape), dtypes[suffix])
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
        block = lax.axis_index("block")
        it = read(KeyItem, refs["items"], lax.div(block, halves) if wide else block)
        half = lax.rem(block, halves) if wide else warpgroup  # half of the item's keys
        walk = KeyWalk(refs, it, work, _STEP)

        def memory_warpgroup():
            plgpu.set_max_registers(config.memory_registers, action="decrease")
            first_key = half * ROWS if wide else 0
            stream = QueryStream(refs, smem, bars, _ROW_OPERANDS, first_key)
            stream.drain(walk.load_all(stream))

        def compute_warpgroup():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            plgpu.barrier_wait(bars["keys_full"])
            shared = smem, bars, warpgroup, stages, scale * LOG2E, interpreted
            if not wide:
                steps = _PairedSteps if config.paired else _Steps
                return accumulate(steps(*shared), ("dk", "dv"))
            pl.when(warpgroup == 0)(lambda: accumulate(_WeightSteps(*shared), ("dv",)))
            pl.when(warpgroup == 1)(lambda: accumulate(_KeySteps(*shared), ("dk",), masks=False))

        def accumulate(steps, sums, masks=True):
            *gradients, end = accumulate_keys(
                smem,
                warpgroup,
                interpreted,
                lambda add: walk.run_all(
                    half if masks else None, functools.partial(steps.run, add)
                ),
                sums,
            )
            steps.release(end - 1)
            steps.drain(end)
            gradients = dict(zip(sums, gradients, strict=True))
            # Only this warpgroup's products have read this memory.
            mine = pl.ds(0 if wide else half * ROWS, ROWS)
            free = {"dk": "v", "dv": "k"}

            def store(suffix, block):
                rows = pl.ds(block * TILE + half * ROWS, ROWS)
                for name, x in gradients.items():
                    target = refs[name + suffix].at[it.batch, rows, it.head]
                    x = (x * scale if name == "dk" else x).astype(target.dtype)
                    store_rows(x, target, smem[free[name]].at[mine], wait=False)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

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

    smem = key_memory(stages, _STEP, head_dim, q.dtype, _ROW_OPERANDS, TILE // halves)
    if wide:
        smem["weights"] = tiled((_WEIGHTS, ROWS, _STEP), q.dtype)
    if interpreted:
        smem |= key_scratch(_STEP, head_dim, q.dtype)
    inputs = dict(q=q, k=k, v=v, dout=dout, base=base, minus_delta=-delta)
    inputs |= work.operands | (columns.operands if has_columns else {})
    bars = key_barriers(stages)
    if wide:
        bars |= dict.fromkeys(
            ("weights_full", "weights_free"), plgpu.Barrier(num_barriers=_WEIGHTS)
        )
    num_blocks = work.items.shape[0] * halves
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

    def drain(self, steps: Array) -> None: ...

    def run(self, add: AddProduct, step: Array, mask: KeyMask) -> None:
        """Adds the gradients from 64 queries; its last products overlap with the next step's."""
        q_tile, dout_tile = self.tiles(step)
        own = pl.ds(self.warpgroup * ROWS, ROWS)
        logits = self.product("base", step, self.smem["k"].at[own], q_tile)
        # The products of the previous step are older than this one's.
        self.release(step - 1)
        p = self.weights(logits, mask)
        add("dv", p.astype(q_tile.dtype), dout_tile)
        dp = self.product("minus_delta", step, self.smem["v"].at[own], dout_tile)
        add("dk", (p * dp).astype(q_tile.dtype), q_tile)

    def tiles(self, step: Array) -> tuple[Any, Any]:
        slot = lax.rem(step, self.stages)
        plgpu.barrier_wait(self.bars["full"].at[slot])
        return self.smem["q"].at[slot], self.smem["dout"].at[slot]

    def product(
        self, start: str, step: Array, keys: Any, tile: Any, meanwhile: Any = None
    ) -> Array:
        begin = functools.partial(self.begin, start, step)
        return product_plus(begin, keys, tile.T, (ROWS, _STEP), self.interpreted, meanwhile)

    def begin(self, name: str, step: Array) -> Array:
        """Returns what an accumulator starts from, instead of a subtraction per element."""
        row = self.smem[name].at[lax.rem(step, self.stages)]
        values = plgpu.load(row, layout=COLUMN_LAYOUT)
        return lax.broadcast_in_dim(values, (ROWS, _STEP), [1])

    def weights(self, logits: Array, mask: KeyMask) -> Array:
        logits, bias = mask.apply(logits)
        return jnp.exp2(add_bias(logits * self.log2_scale, bias))

    def release_early(self, step: Array) -> Callable[[], None]:
        """Releases the previous step as soon as its products are done: few are in flight."""
        return lambda: self.release(step - 1)


class _PairedSteps(_Steps):
    """Steps that start dP next to S; only heads of 64 leave registers for both."""

    def run(self, add: AddProduct, step: Array, mask: KeyMask) -> None:
        q_tile, dout_tile = self.tiles(step)
        own = pl.ds(self.warpgroup * ROWS, ROWS)

        def body(qk: Any, dov: Any) -> None:
            qk.start(self.begin("base", step))
            dov.start(self.begin("minus_delta", step))
            qk.add(self.smem["k"].at[own], q_tile.T)
            dov.add(self.smem["v"].at[own], dout_tile.T)
            logits = qk.value(younger=1)
            self.release(step - 1)
            p = self.weights(logits, mask)
            add("dv", p.astype(q_tile.dtype), dout_tile)
            dp = dov.value(younger=1)
            add("dk", (p * dp).astype(q_tile.dtype), q_tile)

        with_accumulators(body, *2 * [(ROWS, _STEP)], interpreted=self.interpreted)


class _WeightSteps(_Steps):
    """The steps of the warpgroup that computes P and dv of a thread block's 64 keys."""

    def run(self, add: AddProduct, step: Array, mask: KeyMask) -> None:
        q_tile, dout_tile = self.tiles(step)
        logits = self.product("base", step, self.smem["k"], q_tile, self.release_early(step))
        p = self.weights(logits, mask).astype(q_tile.dtype)
        slot = lax.rem(step, _WEIGHTS)
        pl.when(step >= _WEIGHTS)(lambda: plgpu.barrier_wait(self.bars["weights_free"].at[slot]))
        self.smem["weights"][slot] = p
        plgpu.barrier_arrive(self.bars["weights_full"].at[slot])
        add("dv", p, dout_tile)

    def drain(self, steps: Array) -> None:
        await_last([self.bars["weights_free"]], steps, _WEIGHTS)


class _KeySteps(_Steps):
    """The steps of the warpgroup that computes dP and, with the other one's P, dk."""

    def run(self, add: AddProduct, step: Array, mask: KeyMask) -> None:
        q_tile, dout_tile = self.tiles(step)
        early = self.release_early(step)
        dp = self.product("minus_delta", step, self.smem["v"], dout_tile, early)
        slot = lax.rem(step, _WEIGHTS)
        plgpu.barrier_wait(self.bars["weights_full"].at[slot])
        weights = self.smem["weights"].at[slot]
        p = plgpu.load(weights, layout=plgpu.Layout.WGMMA, optimized=False)
        plgpu.barrier_arrive(self.bars["weights_free"].at[slot])
        add("dk", (p.astype(jnp.float32) * dp).astype(q_tile.dtype), q_tile)
