"""Scores of key blocks by probe queries, by Triton kernels."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.checks import Shaped
from pallas_kernels.interface import Estimate, Pair, ProbeCall
from pallas_kernels.masses import LOG2E
from pallas_kernels.triton.call import Call, Run, run_on_gpu
from pallas_kernels.triton.configs import Config

NUM_QUERIES = 64
_BLOCK = 128
# For both kernels; selected like those of configs.py, by what the compiler reports for sm_80.
CONFIG = Config(rows=NUM_QUERIES, keys=_BLOCK, warps=4, stages=3)


@dataclasses.dataclass(frozen=True)
class TritonEstimate(Estimate):
    run: Run = run_on_gpu

    def unsupported(self, q: Shaped) -> str | None:
        if q.shape[2] == NUM_QUERIES:
            return None
        return f"{q.shape[2]} last queries (must be {NUM_QUERIES})"

    def block_statistics(self, call: ProbeCall) -> Pair:
        from pallas_kernels.triton.kernels.estimate import estimate_statistics

        outputs = "peak", "total"
        found = self._over_blocks(estimate_statistics, call, {}, outputs, NUM_QUERIES)
        return found["peak"], found["total"]

    def block_masses(
        self, call: ProbeCall, peak: Array, to_mass: Array
    ) -> tuple[Array, Array, Array]:
        from pallas_kernels.triton.kernels.estimate import estimate_masses

        rows, outputs = {"peak": peak, "to_mass": to_mass}, ("columns", "own_diagonals", "beyond")
        found = self._over_blocks(estimate_masses, call, rows, outputs, _BLOCK)
        return found["columns"], found["own_diagonals"], found["beyond"]

    def _over_blocks(
        self,
        kernel: Any,
        of: ProbeCall,
        rows: dict[str, Array],
        outputs: tuple[str, ...],
        size: int,
    ) -> dict[str, Array]:
        q, k, block_ids, queries = of.q, of.k, of.block_ids, of.queries
        batch, num_local = k.shape[0], block_ids.shape[0]
        # The positions of each block's queries.
        end = jnp.asarray(of.num_blocks * _BLOCK if of.valid_len is None else of.valid_len)
        shifts = end.reshape(-1, 1) - NUM_QUERIES - block_ids * _BLOCK
        if queries is None:
            queries = jnp.arange(batch, dtype=jnp.int32)
        shifts = jnp.broadcast_to(shifts.astype(jnp.int32), (batch, num_local))
        values: dict[str, Any] = rows | dict(q=q, k=k, shifts=shifts, queries=queries)
        values |= dict(HEADS=q.shape[1], KV_HEADS=k.shape[2], DIM=q.shape[3])
        values["log2_scale"] = float(of.scale) * LOG2E
        output = jax.ShapeDtypeStruct((batch, q.shape[1], num_local, size), jnp.float32)
        grid = batch * k.shape[2], num_local
        return self.run(Call.of(kernel, values, dict.fromkeys(outputs, output), grid, CONFIG))
