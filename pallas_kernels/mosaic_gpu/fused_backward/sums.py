"""Ordered additions to global memory by the thread blocks of the fused backward kernel."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

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

    The first turn of a query block stores instead: `target` starts undefined. `counters`, int32
    [B, Hq, steps of all queries, 1], are numbers of completed turns. The interpreter has no number,
    and runs items in order: an early turn adds NaN.
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
            before = jnp.where(turn == 0, 0.0, dq[...])
            dq[...] = before + (added[...] + poison)
            counters[batch, head, tile, 0] = turn + 1
            plgpu.barrier_arrive(free)
            return
        _await_turn(counter, turn)
        pl.when(turn == 0)(lambda: plgpu.copy_smem_to_gmem(added, dq))
        pl.when(turn > 0)(lambda: plgpu.copy_smem_to_gmem(added, dq, reduction_op="add"))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(free)
        plgpu.wait_smem_to_gmem(0)
        _end_turn(counter)

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
    """Adds dk and dv [64, D] to those of earlier heads at a turn; `counter` is None for one head.

    `staging` is unused shared memory, fp32 [64, D].
    """
    taken = counter is not None and not interpreted
    if taken:
        _await_turn(counter, turn, warp=False)
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
        _end_turn(counter, warp=False)


def _await_turn(counter: Any, turn: Array, warp: bool = True) -> None:
    """Waits until the counter int32 [1] has reached a turn; earlier turns' writes are visible."""
    scope = _scope(warp)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))
    def wait(_, ref, value):
        semaphore = mgpu.SemaphoreRef(mgpu.memref_ptr(ref))
        semaphore.wait(value.registers.item(), decrement=False, scope=scope, memory_scope="gpu")
        # The copies that follow are made by another proxy than the wait.
        mgpu.inline_ptx("fence.proxy.async.global;", has_side_effects=True)

    wait(counter, turn)  # pyright: ignore[reportCallIssue]


def _end_turn(counter: Any, warp: bool = True) -> None:
    """Passes the turn on, after everything that the caller wrote to global memory."""
    scope = _scope(warp)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def signal(_, ref):
        if not warp:
            mgpu.warpgroup_barrier()  # the whole warpgroup has written
        semaphore = mgpu.SemaphoreRef(mgpu.memref_ptr(ref))
        semaphore.signal(1, predicate=mgpu.single_thread_predicate(scope), memory_scope="gpu")

    signal(counter)  # pyright: ignore[reportCallIssue]


def _scope(warp: bool) -> mgpu.ThreadSubset:
    return mgpu.ThreadSubset.WARP if warp else mgpu.ThreadSubset.WARPGROUP
