"""Ordered additions to global memory by the thread blocks of the fused backward kernel."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.fused_backward.turn_counters import await_turn, end_turn
from pallas_kernels.mosaic_gpu.fused_backward.walk import FusedWalk

# Warps that alternate in adding dq, each with its own shared memory: while one waits until its sums
# are visible to all and passes the turn on, the other adds.
ADDING_WARPS = 2


def add_queries(
    walk: FusedWalk,
    target: Any,
    counters: Any,
    smem: dict[str, Any],
    bars: dict[str, Any],
    number: Array | None,
) -> None:
    """Adds dq of an item's steps, each at its turn; run by warp `number`, for every second step.

    `counters`, int32 [B, Hq, steps of all queries, 1], are numbers of completed turns. Without a
    number (in the interpreter items run in order) it must already be their turn; otherwise NaN is
    added.
    """
    batch = walk.it.batch

    def add(head: Array, tile: Array, turn: Array, step: Array) -> None:
        counter = counters.at[batch, head, tile, pl.ds(0, 1)]
        dq = target.at[batch, pl.ds(tile * walk.queries, walk.queries), head]
        slot = lax.rem(step, ADDING_WARPS)
        added, free = smem["dq"].at[slot], bars["dq_free"].at[slot]
        plgpu.barrier_wait(bars["dq_full"].at[slot])
        if number is None:
            early = counters[batch, head, tile, 0] != turn
            poison = jnp.where(early, jnp.float32(jnp.nan), jnp.float32(0))
            dq[...] = dq[...] + (added[...] + poison)
            counters[batch, head, tile, 0] = turn + 1
            plgpu.barrier_arrive(free)
            return
        await_turn(counter, turn)
        plgpu.copy_smem_to_gmem(added, dq, reduction_op="add")
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(free)
        plgpu.wait_smem_to_gmem(0)
        end_turn(counter)

    def visit(head: Array, row_block: Array, turn: Array, step: Array) -> Array:
        for part in range(walk.parts):
            own = True if number is None else lax.rem(step + part, ADDING_WARPS) == number

            @pl.when(own)
            def _(part: int = part) -> None:
                add(head, row_block * walk.parts + part, turn, step + part)

        return step + walk.parts

    walk.row_blocks(visit, jnp.int32(0))


def add_keys(
    targets: tuple[Any, Any],
    gradients: tuple[Array, Array],
    staging: Any,
    counter: Any | None,
    turn: Array,
    interpreted: bool,
) -> None:
    """Adds dk and dv [64, D] to those of earlier items, heads with the same keys, at a turn.

    The first turn overwrites them; `counter` is None if it is the only one. `staging` is unused
    shared memory, fp32 [64, D].
    """
    taken = counter is not None and not interpreted
    if taken:
        await_turn(counter, turn, warp=False)
    for target, x in zip(targets, gradients, strict=True):
        if interpreted:
            if counter is not None:
                x = lax.cond(turn > 0, lambda x=x, target=target: target[...] + x, lambda x=x: x)
            target[...] = x
            continue
        staging[...] = x
        plgpu.commit_smem()
        if counter is None:
            plgpu.copy_smem_to_gmem(staging, target)
        else:

            @pl.when(turn == 0)
            def _(target: Any = target) -> None:
                plgpu.copy_smem_to_gmem(staging, target)

            @pl.when(turn > 0)
            def _(target: Any = target) -> None:
                plgpu.copy_smem_to_gmem(staging, target, reduction_op="add")

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.wait_smem_to_gmem(0)
    if taken:
        end_turn(counter, warp=False)
