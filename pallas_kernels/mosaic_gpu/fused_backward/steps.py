"""The products of one step of the fused backward kernel, by one compute warpgroup.

dQ of a step needs dS of both warpgroups. It is computed one step late: they need not be in sync.
"""

# pyright: reportPrivateImportUsage=false
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.common import COLUMN_LAYOUT, LOG2E, ROWS, Config, await_last, product
from pallas_kernels.mosaic_gpu.fused_backward.sums import ADDING_WARPS
from pallas_kernels.mosaic_gpu.interpreter import AddProduct, accumulate_keys
from pallas_kernels.mosaic_gpu.masks import KeyMask, add_bias


@dataclasses.dataclass(frozen=True)
class FusedConfig(Config):
    """Tuning of the fused backward kernel and of its work order."""

    retire_dk: bool = False  # wait for dK before the next step begins
    early_shift: bool = False  # load the shift of the logits before waiting for them
    ds_from_memory: bool = True  # dK reads dS from shared memory, not from registers
    item_heads: int | None = None  # query heads per item: see `fused_work`
    waves: bool = False  # alternate sequences after as many items as there are multiprocessors


class FusedSteps:
    """The steps of one compute warpgroup, which owns half of a thread block's keys."""

    def __init__(
        self,
        smem: dict[str, Any],
        bars: dict[str, Any],
        warpgroup: Array,
        config: FusedConfig,
        scale: float,
        interpreted: bool,
    ):
        self.smem, self.bars, self.warpgroup, self.config = smem, bars, warpgroup, config
        self.scale, self.interpreted = scale, interpreted
        self.head_dim, self.dtype = smem["k"].shape[-1], smem["k"].dtype
        self.shape = ROWS, smem["q"].shape[1]

    def run(self, walk: Callable[[Callable[[Array, KeyMask], Array]], Array]) -> Any:
        """Runs all steps of a walk; returns dk, dv [64, D] fp32 and the number of steps."""
        run_step = self._interpreted_step if self.interpreted else self._step
        return accumulate_keys(
            self.smem,
            self.warpgroup,
            self.interpreted,
            lambda add: walk(functools.partial(run_step, add)),
        )

    def finish(self, end: Array) -> None:
        @pl.when(end > 0)
        def _() -> None:
            self._await_ds(end - 1)
            self._finish_previous(self._previous_dq(end), end)

    def drain(self, end: Array) -> None:
        await_last([self.bars["dq_free"]], end, ADDING_WARPS)

    def _step(self, add: AddProduct, step: Array, mask: KeyMask) -> Array:
        config, smem, slot = self.config, self.smem, lax.rem(step, self.config.stages)
        q_tile, dout_tile = smem["q"].at[slot], smem["dout"].at[slot]
        pl.when(step > 0)(lambda: self._await_ds(step - 1))

        def body(dq_acc: Any, s_acc: Any, dp_acc: Any) -> None:
            # The first step reads uninitialized memory here; the result is not used.
            plgpu.wgmma(dq_acc, *self._dq_operands(lax.rem(step + 1, 2), self._own()))
            plgpu.barrier_wait(self.bars["full"].at[slot])
            plgpu.wgmma(s_acc, smem["k"].at[self._own()], q_tile.T)
            shift = self._load("shift", slot) if config.early_shift else None
            # S is in flight while dq of the previous step is awaited and stored.
            self._finish_previous(plgpu.wgmma_accumulator_load(dq_acc, wait_n=1), step)
            # The accumulator starts from -delta, which would otherwise be subtracted per element.
            dp_acc[...] = self._columns(self._load("minus_delta", slot))
            plgpu.wgmma(dp_acc, smem["v"].at[self._own()], dout_tile.T)
            p = self._weights(plgpu.wgmma_accumulator_load(s_acc, wait_n=1), mask, slot, shift)
            add("dv", p.astype(self.dtype), dout_tile)
            ds = (p * plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)).astype(self.dtype)
            self._publish_ds(ds, step)
            plgpu.wgmma_wait(0)  # with dV done, P's registers are free
            if config.ds_from_memory:
                ds = smem["ds"].at[lax.rem(step, 2), self._own()]
            add("dk", ds, q_tile)
            if config.retire_dk:
                plgpu.wgmma_wait(0)

        tile = plgpu.ACC(self.shape, jnp.float32)
        pl.run_scoped(body, plgpu.ACC((ROWS, ROWS), jnp.float32), tile, tile)
        return step + 1

    def _interpreted_step(self, add: AddProduct, step: Array, mask: KeyMask) -> Array:
        """Runs a step with interpreter operations only: no accumulators across products."""
        smem, slot = self.smem, lax.rem(step, self.config.stages)
        q_tile, dout_tile = smem["q"].at[slot], smem["dout"].at[slot]
        own = self._own()

        @pl.when(step > 0)
        def _() -> None:
            self._await_ds(step - 1)
            self._finish_previous(self._previous_dq(step), step)

        plgpu.barrier_wait(self.bars["full"].at[slot])
        p = self._weights(product(smem["k"].at[own], q_tile.T, self.shape), mask, slot)
        add("dv", p.astype(self.dtype), dout_tile)
        base = self._columns(self._load("minus_delta", slot))
        dp = base + product(smem["v"].at[own], dout_tile.T, self.shape)
        ds = (p * dp).astype(self.dtype)
        add("dk", ds, q_tile)
        self._publish_ds(ds, step)
        return step + 1

    def _own(self) -> Any:
        """Returns the keys of this warpgroup, and the columns or rows of dq."""
        # The barrier hides that they never change, or all addresses would stay in registers.
        return pl.ds(lax.optimization_barrier(self.warpgroup) * ROWS, ROWS)

    def _load(self, name: str, slot: Array) -> Array:
        return plgpu.load(self.smem[name].at[slot], layout=COLUMN_LAYOUT)

    def _columns(self, values: Array) -> Array:
        return lax.broadcast_in_dim(values, self.shape, [1])

    def _weights(
        self, logits: Array, mask: KeyMask, slot: Array, shift: Array | None = None
    ) -> Array:
        logits, bias = mask.apply(logits)
        shift = self._load("shift", slot) if shift is None else shift
        logits = logits * (self.scale * LOG2E) + self._columns(shift)
        return jnp.exp2(add_bias(logits, bias))

    def _publish_ds(self, ds: Array, step: Array) -> None:
        self.smem["ds"].at[lax.rem(step, 2), self._own()][...] = ds
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.bars["ds_full"].at[lax.rem(step, 2)])

    def _await_ds(self, step: Array) -> None:
        plgpu.barrier_wait(self.bars["ds_full"].at[lax.rem(step, 2)])

    def _dq_operands(self, slot: Array, own: Any) -> tuple[Any, Any]:
        ds = self.smem["ds"].at[slot]
        if self.head_dim == 128:  # half of the columns
            return ds.T, self.smem["k"].at[:, own]
        return ds.at[:, own].T, self.smem["k"]

    def _previous_dq(self, step: Array) -> Array:
        a, b = self._dq_operands(lax.rem(step + 1, 2), self._own())
        return product(a, b, (ROWS, ROWS))

    def _finish_previous(self, dq: Array, step: Array) -> None:
        """Once dq of the previous step is done, all of that step's products are."""

        @pl.when(step > 0)
        def _() -> None:
            free = self.bars["free"].at[lax.rem(step - 1, self.config.stages)]
            plgpu.barrier_arrive(free)
            self._stage_dq(dq, step - 1)

    def _stage_dq(self, dq: Array, step: Array) -> None:
        slot = lax.rem(step, ADDING_WARPS)

        @pl.when(step >= ADDING_WARPS)
        def _() -> None:
            plgpu.barrier_wait(self.bars["dq_free"].at[slot])

        own, dq_tile = self._own(), self.smem["dq"].at[slot]
        target = dq_tile.at[:, own] if self.head_dim == 128 else dq_tile.at[own]
        target[...] = dq * self.scale
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.bars["dq_full"].at[slot])
