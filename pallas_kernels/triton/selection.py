"""Scores of key blocks for index selection, by Triton kernels."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.interface import NUM_QUERIES, Estimate, Pair, ProbeCall
from pallas_kernels.masses import LOG2E, BlockScores, ScoreCall, ScoreTiles
from pallas_kernels.triton.call import Call, Run, run_on_gpu
from pallas_kernels.triton.configs import Config

_BLOCK = 128
# Selected like those of configs.py, by what the compiler reports for sm_80.
CONFIG = Config(rows=NUM_QUERIES, keys=_BLOCK, warps=8, stages=3)
SCORES = Config(rows=64, keys=128, warps=4, stages=3)
# Two per multiprocessor of an A100, the limit of shared memory with head dim 64; not timed.
_PROGRAMS = 216


@dataclasses.dataclass(frozen=True)
class TritonEstimate(Estimate):
    run: Run = run_on_gpu

    def block_statistics(self, call: ProbeCall) -> Pair:
        from pallas_kernels.triton.kernels.estimate import estimate_statistics

        outputs = "peak", "total"
        return self._over_blocks(estimate_statistics, call, {}, outputs, NUM_QUERIES)

    def block_masses(
        self, call: ProbeCall, peak: Array, to_mass: Array
    ) -> tuple[Array, Array, Array]:
        from pallas_kernels.triton.kernels.estimate import estimate_masses

        rows, outputs = {"peak": peak, "to_mass": to_mass}, ("columns", "own_diagonals", "beyond")
        return self._over_blocks(estimate_masses, call, rows, outputs, _BLOCK)

    def _over_blocks(
        self,
        kernel: Any,
        of: ProbeCall,
        rows: dict[str, Array],
        outputs: tuple[str, ...],
        size: int,
    ) -> Any:
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
        found = self.run(Call.of(kernel, values, dict.fromkeys(outputs, output), grid, CONFIG))
        return tuple(found[name] for name in outputs)


@dataclasses.dataclass(frozen=True)
class TritonBlockScores(BlockScores):
    run: Run = run_on_gpu

    def tiles(self, length: int) -> ScoreTiles:
        return ScoreTiles(SCORES.rows, SCORES.keys, _PROGRAMS)

    def scores(self, call: ScoreCall) -> tuple[Array, Array]:
        from pallas_kernels.triton.kernels.block_scores import block_scores

        q, k, places, starts, scale, block_columns = call
        batch, heads, num_rows, length = q.shape
        kv_heads, num_keys = k.shape[1:3]
        values = dict(q=q, k=k, places=places, starts=starts, COLUMNS=block_columns)
        values |= dict(log2_scale=float(scale) * LOG2E, num_rows=num_rows, num_keys=num_keys)
        values |= dict(HEADS=heads, KV_HEADS=kv_heads, LENGTH=length)
        values |= dict(ONE_FOR_ALL=places.shape[0] == 1, HAS_STARTS=starts is not None)
        shape = batch, heads, num_keys // block_columns, num_rows
        outputs = {
            "scores": jax.ShapeDtypeStruct(shape, jnp.float32),
            "peak": jax.ShapeDtypeStruct((batch, heads, num_rows), jnp.float32),
        }
        grid = num_rows // SCORES.rows, heads, batch
        found = self.run(Call.of(block_scores, values, outputs, grid, SCORES))
        return found["scores"], found["peak"]
