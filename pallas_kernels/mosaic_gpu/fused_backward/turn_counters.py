"""Counters in global memory that order thread blocks."""

from typing import Any

from jax import Array
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu


def await_turn(counter: Any, turn: Array, warp: bool = True) -> None:
    """Waits until the counter int32 [1] has reached a turn; earlier turns' writes are visible."""
    scope = _scope(warp)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))
    def wait(_, ref, value):
        semaphore = mgpu.SemaphoreRef(mgpu.memref_ptr(ref))
        semaphore.wait(value.registers.item(), decrement=False, scope=scope, memory_scope="gpu")

    wait(counter, turn)  # pyright: ignore[reportCallIssue]


def end_turn(counter: Any, warp: bool = True) -> None:
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
