"""The only Hopper forward kernel: list-driven flash attention with gathered columns."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.interface import ForwardCall
from pallas_kernels.mosaic_gpu.common import (
    EDGE,
    LOG2E,
    ROW_LAYOUT,
    ROWS,
    TILE,
    WARPGROUPS,
    Config,
    await_last,
    block_of,
    fold,
    full,
    gathered_columns,
    launch,
    load_rows,
    partial_sums,
    rows_to_tile,
    store_rows,
    tiled,
)
from pallas_kernels.mosaic_gpu.interpreter import add_product, with_accumulators
from pallas_kernels.mosaic_gpu.key_stream import Producer, stream_barriers, stream_memory
from pallas_kernels.mosaic_gpu.query_walk import QueryWalk, work_operands
from pallas_kernels.mosaic_gpu.work_queue import (
    WorkQueue,
    queue_barriers,
    queue_memory,
    queue_operands,
)


@dataclasses.dataclass(frozen=True)
class ForwardConfig(Config):
    query_slots: int = 2  # query blocks in shared memory; 2 prefetches the next item's
    keys_late: bool = False  # wait for the next tile's keys after the softmax, not before QK


def forward_kernel(
    call: ForwardCall, config: ForwardConfig, num_blocks: int, interpret: Any
) -> tuple[Array, Array]:
    """Returns out and lse, merged with those of `init`; `num_blocks` persistent thread blocks."""
    q, k, v, plan, _, scale, init, out_dtype, _ = call
    work, columns = plan.work.queries, gathered_columns(call)
    # Faster for lists, slower for diagonals: docs/design/hopper-flash-attention.md.
    turns = work.listed
    # Diagonals keep thread blocks in step, and next to transfers they end early.
    drawn = work.listed and not (call.overlaps_collectives or interpret)
    # Items of windows are short: their outputs leave during the next item.
    late = work.window is not None and config.query_slots > 1
    head_dim, dtype = q.shape[-1], q.dtype
    query_slots, parts = config.query_slots, TILE // config.keys
    num_items = work.items.shape[0]
    num_blocks = min(num_blocks, num_items)
    interpreted = bool(interpret)
    log2_scale = scale * LOG2E

    def attention_forward(refs):
        smem, bars = refs["smem"], refs["bars"]
        walk = QueryWalk(refs, work)
        warpgroup = lax.axis_index("wg")
        queue = WorkQueue(refs, num_items, num_blocks)

        def memory_warpgroup():
            plgpu.set_max_registers(config.memory_registers, action="decrease")
            producer = Producer(walk, smem, bars, lag=True)

            def load_item(carry):
                n, number, step = carry
                it = walk.item(number)
                slot = lax.rem(n, query_slots)

                @pl.when(n >= query_slots)
                def _():
                    plgpu.barrier_wait(bars["q_free"].at[slot])

                queue.draw_after(n)
                rows = pl.ds(it.block * TILE, TILE)
                plgpu.copy_gmem_to_smem(
                    refs["q"].at[it.batch, rows, it.head],
                    smem["q"].at[slot],
                    bars["q_full"].at[slot],
                )
                step = producer.load_item(it, step)
                return n + 1, queue.after(n, bars["q_full"].at[slot]), step

            queue.draw_first()
            state = jnp.int32(0), queue.first(), jnp.int32(0)
            n, _, steps = lax.while_loop(lambda x: x[1] < num_items, load_item, state)
            producer.drain(steps)
            await_last([bars["q_free"]], n, query_slots)

        def compute_warpgroup():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            if turns:  # warpgroup 0 begins, and at the end awaits the turn that it does not use
                pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(bars["turn"].at[0]))

            def end_store(n):
                if late:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(bars["q_free"].at[lax.rem(n, query_slots)])

            def end_previous(n):
                if late:
                    pl.when(n > 0)(lambda: end_store(n - 1))

            def item(number):
                """Reads an item; its batch is -1 if there is none."""
                it = walk.item(lax.min(number, num_items - 1))
                return it._replace(batch=jnp.where(number < num_items, it.batch, -1))

            def compute_item(carry):
                n, step, it = carry
                if not drawn:  # read during the item before, which hides the latency
                    following = item(queue.after(n))
                slot = lax.rem(n, query_slots)
                q_tile = smem["q"].at[slot, pl.ds(warpgroup * ROWS, ROWS)]
                rows = pl.ds(it.block * TILE + warpgroup * ROWS, ROWS)
                if init is None:
                    acc = full((ROWS, head_dim), 0.0, plgpu.Layout.WGMMA)
                    state = acc, full((ROWS,), -jnp.inf, ROW_LAYOUT), partial_sums(0.0)
                else:
                    peak = load_rows(refs["lse0"].at[it.batch, it.head, rows]) / scale
                    acc = plgpu.load(
                        refs["out0"].at[it.batch, rows, it.head],
                        layout=plgpu.Layout.WGMMA,
                        optimized=False,
                    )
                    # Split over the eight partial sums of a row.
                    total = jnp.where(peak > -jnp.inf, 1 / EDGE, 0.0)
                    state = acc, peak, rows_to_tile(total, partial_sums(0.0))
                plgpu.barrier_wait(bars["q_full"].at[slot])
                if drawn:
                    following = item(queue.after(n))
                segments = walk.segments(it, warpgroup)
                staging = smem["p"].at[warpgroup] if interpreted else None
                shared = smem, bars, q_tile, staging
                turn = warpgroup if turns else None
                tiles = _Tiles(step, it.steps * parts, *shared, log2_scale, config.keys_late, turn)
                first = walk.first_masks(it, warpgroup)

                def run(state):
                    state = tiles.first_step(first, state)
                    end_previous(n)
                    return tiles.overlapped(segments, state)

                def skip(state):
                    end_previous(n)
                    return state

                state = lax.cond(it.steps > 0, run, skip, state)
                store(it, rows, q_tile, state)
                if not late:
                    end_store(n)
                return n + 1, step + it.steps * parts, following

            def store(it, rows, q_tile, state):
                acc, peak, total = state
                total = total.sum(axis=1)
                seen = total > 0.0
                total = jnp.where(seen, total, 1.0)
                acc = acc * rows_to_tile(jnp.where(seen, 1.0 / total, 0.0), acc)
                lse = jnp.where(seen, peak * scale + jnp.log(total), -jnp.inf)
                refs["lse"].at[it.batch, it.head, rows][...] = lse
                out = acc.astype(out_dtype)
                store_rows(out, refs["out"].at[it.batch, rows, it.head], q_tile, wait=not late)

            state = jnp.int32(0), jnp.int32(0), item(queue.first())
            n, *_ = lax.while_loop(lambda x: x[2].batch >= 0, compute_item, state)
            end_previous(n)
            if turns:
                pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(bars["turn"].at[0]))

        pl.when(warpgroup == WARPGROUPS)(memory_warpgroup)
        pl.when(warpgroup < WARPGROUPS)(compute_warpgroup)

    smem = {
        "q": tiled((query_slots, WARPGROUPS * ROWS, head_dim), dtype),
        **queue_memory(drawn),
        **stream_memory(config, head_dim, dtype, columns is not None),
    }
    if interpreted:
        smem["p"] = tiled((WARPGROUPS, ROWS, config.keys), dtype)
    bars = {
        "q_full": plgpu.Barrier(num_barriers=query_slots),
        "q_free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=query_slots),
        **queue_barriers(drawn),
        **stream_barriers(config, columns is not None),
    }
    if turns:
        bars["turn"] = plgpu.Barrier(num_barriers=WARPGROUPS)
    inputs = {"q": q, "k": k, "v": v, **work_operands(work, columns)}
    if init is not None:
        inputs |= {"out0": init[0].astype(jnp.float32), "lse0": init[1].astype(jnp.float32)}
    inputs |= queue_operands(drawn, inputs)
    outputs = {
        "out": jax.ShapeDtypeStruct(q.shape, out_dtype),
        "lse": jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32),
    }
    results = launch(attention_forward, inputs, outputs, smem, bars, num_blocks, interpret)
    return results["out"], results["lse"]


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """The steps of one item in one compute warpgroup; state is (acc, peak, total [64, 8])."""

    step: Array  # tiles of keys before this item, since the start of the kernel
    steps: Array  # tiles of keys of this item
    smem: dict[str, Any]
    bars: dict[str, Any]
    q_tile: Any
    staging: Any  # shared memory for the weights in the interpreter, else None
    log2_scale: float
    keys_late: bool
    # The number of this warpgroup if the two alternate: products of one run during the softmax of
    # the other. None if each starts its products as soon as it can.
    turn: Array | None

    @property
    def parts(self):
        return TILE // self.smem["k"].shape[1]

    @property
    def logits_shape(self):
        return ROWS, self.smem["k"].shape[1]

    @property
    def interpreted(self):
        return dict(interpreted=self.staging is not None, staging=self.staging)

    def slot(self, s):
        return lax.rem(self.step + s, self.smem["k"].shape[0])

    def following(self, slot):
        return jnp.where(slot == self.smem["k"].shape[0] - 1, 0, slot + 1)

    def softmax(self, logits, peak, total):
        """Returns unnormalized weights, new peak and totals, and the decay of earlier sums."""
        new_peak = jnp.maximum(peak, fold(jnp.maximum, logits).max(axis=1))
        finite = jnp.where(new_peak > -jnp.inf, new_peak, 0.0)
        base = finite * self.log2_scale
        # Exactly 1 while the peak is the same: in a fused multiply-add, peak * scale - base is not.
        decay = jnp.exp2((peak - finite) * self.log2_scale)
        weights = jnp.exp2(logits * self.log2_scale - rows_to_tile(base, logits))
        return weights, new_peak, total * rows_to_tile(decay, total) + fold(jnp.add, weights), decay

    def logits(self, s, mask):
        slot = self.slot(s)
        prepared = mask.prepare(s)
        plgpu.barrier_wait(self.bars["k_full"].at[slot])
        mask.await_bias(self.bars, slot)
        bias = mask.bias(self.smem, slot, 0, self.logits_shape[1])

        def qk(product):
            if bias is not None:
                product.start(bias)
            product.add(self.q_tile, self.smem["k"].at[slot].T)
            return product.value(younger=0)

        logits = with_accumulators(qk, self.logits_shape, **self.interpreted)
        plgpu.barrier_arrive(self.bars["k_free"].at[slot])
        return mask.apply(prepared, logits)

    def add_values(self, acc, weights, slot):
        plgpu.barrier_wait(self.bars["v_full"].at[slot])
        acc = add_product(acc, weights, self.smem["v"].at[slot], **self.interpreted)
        plgpu.barrier_arrive(self.bars["v_free"].at[slot])
        return acc

    def overlapped(self, segments, state):
        """Runs all further tiles, with QK of tile s and PV of s - 1 during the softmax of s."""
        slot = self.slot(0)
        following = self.following(slot)
        if self.keys_late:
            self.await_keys(1, following)
        state = *state, slot, following
        for start, stop, mask in segments:
            body = functools.partial(self.overlapped_step, mask=mask)
            steps = lax.max(1, start * self.parts), stop * self.parts
            state = lax.fori_loop(*steps, body, state)
        acc, peak, total, weights, slot, _ = state
        return self.add_values(acc, weights, slot), peak, total

    def first_step(self, masks, state):
        (applies, mask), *others = masks
        if others:
            first, rest = (functools.partial(self.first_step, x) for x in ([masks[0]], others))
            return lax.cond(applies, first, rest, state)
        acc, peak, total = state
        weights, peak, total, decay = self.softmax(self.logits(0, mask), peak, total)
        return acc * rows_to_tile(decay, acc), peak, total, weights.astype(self.q_tile.dtype)

    def await_keys(self, s, slot):
        @pl.when(s < self.steps)
        def _():
            plgpu.barrier_wait(self.bars["k_full"].at[slot])

    def overlapped_step(self, s, state, mask):
        acc, peak, total, weights, previous, slot = state
        following = self.following(slot)
        block, column = block_of(s, self.parts)
        prepared = mask.prepare(block)
        if not self.keys_late:
            plgpu.barrier_wait(self.bars["k_full"].at[slot])
        if self.turn is None:
            plgpu.barrier_wait(self.bars["v_full"].at[previous])
        else:
            plgpu.barrier_wait(self.bars["turn"].at[self.turn])
        mask.await_bias(self.bars, slot)

        def body(qk, pv):
            pv.start(acc)
            bias = mask.bias(self.smem, slot, 0, self.logits_shape[1])
            if bias is not None:
                qk.start(bias)
            qk.add(self.q_tile, self.smem["k"].at[slot].T)
            if self.turn is not None:
                plgpu.barrier_wait(self.bars["v_full"].at[previous])
            pv.add(weights, self.smem["v"].at[previous])
            if self.turn is not None:
                plgpu.barrier_arrive(self.bars["turn"].at[1 - self.turn])
            logits = qk.value(younger=1)
            plgpu.barrier_arrive(self.bars["k_free"].at[slot])
            # Barriers keep the compiler from moving arithmetic across the waits.
            logits = lax.optimization_barrier(logits)
            logits = mask.apply(prepared, logits, column)
            parts = lax.optimization_barrier(self.softmax(logits, peak, total))
            # The branch also keeps ptxas from moving the next wait before the softmax.
            if self.keys_late:
                self.await_keys(s + 1, following)
            new_acc = pv.value(younger=0)
            plgpu.barrier_arrive(self.bars["v_free"].at[previous])
            return lax.optimization_barrier(new_acc), *parts

        acc, weights, peak, total, decay = with_accumulators(
            body, self.logits_shape, acc.shape, **self.interpreted
        )
        acc = acc * rows_to_tile(decay, acc)
        return acc, peak, total, weights.astype(self.q_tile.dtype), slot, following
