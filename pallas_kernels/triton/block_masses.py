"""Softmax masses of key blocks by a Triton kernel."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.masses import LOG2E, BlockScores, ScoreCall, ScoreTiles
from pallas_kernels.triton.call import Call, Run, run_on_gpu
from pallas_kernels.triton.configs import Config

# Selected like those of configs.py: by what the compiler reports for sm_80.
SCORES = Config(rows=64, keys=128, warps=4, stages=3)
# Two per multiprocessor of an A100, the limit of shared memory with head dim 64; not timed.
_PROGRAMS = 216


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
