"""Which work items a persistent thread block processes: a fixed part, or the next when it is free.

Free thread blocks draw from a counter in global memory. The memory warpgroup draws item n + 1
before it copies the queries of item n; all warpgroups read the number from shared memory once
these queries have arrived.
"""

# pyright: reportPrivateImportUsage=false
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from pallas_kernels.work.query_work import assigned_item

_SLOTS = 4  # of numbers, for at most 3 slots of queries: else a late one could be overwritten


def queue_memory(drawn: bool) -> dict[str, Any]:
    """Returns shared memory for numbers; its name places it below all that copies write.

    There stores need no fence: tests/pallas_kernels/mosaic_gpu/proxy_fences.py.
    """
    return {"ahead": plgpu.SMEM((_SLOTS,), jnp.int32)} if drawn else {}


def queue_barriers(drawn: bool) -> dict[str, Any]:
    return {"first": plgpu.Barrier()} if drawn else {}


def queue_operands(drawn: bool, inputs: dict[str, Array]) -> dict[str, Array]:
    """Returns the counter, which begins at 0, for a call with these other operands.

    It is computed from all of them, so that XLA shares it with no other call, and `jax.vmap` maps
    it. XLA sees an operand that is only read: fusions with slices would ignore that it is written.
    The last to draw writes 0 again.
    """
    if not drawn:
        return {}
    return {"counter": jnp.minimum(sum(_some_bits(x) for x in inputs.values()), 0)}


def _some_bits(x: Array) -> Array:
    """Returns bits of the first element as an integer of at most 24 bits: int32 [1]."""
    first = x[(0,) * x.ndim][None]
    bits = lax.bitcast_convert_type(first, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return (bits.astype(jnp.uint32) >> 8 * (x.dtype.itemsize == 4)).astype(jnp.int32)


class WorkQueue:
    """The numbers of a thread block's items; from `num_items` on there are none left."""

    def __init__(self, refs: dict[str, Any], num_items: int, num_blocks: int):
        self._counter = refs.get("counter")
        self._smem, self._bars = refs["smem"], refs["bars"]
        self._num_blocks, self._last = num_blocks, num_items + num_blocks - 1

    def draw_first(self) -> None:
        """Draws the first item, in the memory warpgroup."""
        if self._counter is not None:
            self.draw_after(jnp.int32(_SLOTS - 1))
            plgpu.barrier_arrive(self._bars["first"])

    def first(self) -> Array:
        if self._counter is None:
            return self._assigned(jnp.int32(0))
        plgpu.barrier_wait(self._bars["first"])
        return self._smem["ahead"][_SLOTS - 1]

    def draw_after(self, n: Array) -> None:
        """Draws the item after the nth, in the memory warpgroup, before it copies queries."""
        if self._counter is not None:
            slot = self._smem["ahead"].at[pl.ds(lax.rem(n, _SLOTS), 1)]
            _draw(self._last)(self._counter, slot)

    def after(self, n: Array, queries_full: Any = None) -> Array:
        """Returns the number of the item after the nth, once the queries of the nth have arrived.

        The memory warpgroup passes the barrier of these queries.
        """
        if self._counter is None:
            return self._assigned(n + 1)
        if queries_full is not None:
            plgpu.barrier_wait(queries_full)
        return self._smem["ahead"][lax.rem(n, _SLOTS)]

    def _assigned(self, n: Array) -> Array:
        return assigned_item(n, lax.axis_index("block"), self._num_blocks)


def _draw(last: int) -> Callable[[Any, Any], None]:
    """Returns a function that copies the counter to shared memory, then adds one to it."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def draw(_: Any, counter: Any, target: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        pointer = mgpu.memref_ptr(counter)
        with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
            number = mgpu.inline_ptx(
                "atom.relaxed.gpu.global.add.u32 $0, [$1], 1;",
                pointer,
                result_types=i32,
                has_side_effects=True,
            )
            memref.store(number, target, [arith.constant(ir.IndexType.get(), 0)])
            mgpu.inline_ptx(
                "st.relaxed.gpu.global.u32 [$0], $1;",
                pointer,
                mgpu.c(0, i32),
                predicate=arith.cmpi(arith.CmpIPredicate.eq, number, mgpu.c(last, i32)),
                has_side_effects=True,
            )

    return draw  # pyright: ignore[reportReturnType]
