"""Softmax masses of key blocks by a Triton kernel."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.masses import LOG2E, BlockScores, ScoreTiles
from pallas_kernels.triton.call import Call, run_on_gpu
from pallas_kernels.triton.configs import Config

# Selected like those of configs.py: by what the compiler reports for sm_80.
SCORES = Config(rows=64, keys=128, warps=4, stages=3)
# Two per multiprocessor of an A100, the limit of shared memory with head dim 64; not timed.
_PROGRAMS = 216


@dataclasses.dataclass(frozen=True)
class TritonBlockScores(BlockScores):
    run: Callable[[Call], dict[str, Array]] | None = None  # None for jax-triton on a GPU

    def tiles(self, length: int) -> ScoreTiles:
        return ScoreTiles(SCORES.rows, SCORES.keys, _PROGRAMS)

    def scores(
        self,
        q: Array,
        k: Array,
        places: Array,
        starts: Array | None,
        *,
        scale: float,
        block_columns: int,
    ) -> tuple[Array, Array]:
        from pallas_kernels.triton.kernels.block_scores import block_scores

        batch, heads, num_rows, length = q.shape
        kv_heads, num_keys = k.shape[1:3]
        shape = batch, heads, num_keys // block_columns, num_rows
        call = Call(
            block_scores,
            {"q": q, "k": k, "places": places, "starts": starts},
            {
                "scores": jax.ShapeDtypeStruct(shape, jnp.float32),
                "peak": jax.ShapeDtypeStruct((batch, heads, num_rows), jnp.float32),
            },
            {"log2_scale": float(scale) * LOG2E, "num_rows": num_rows, "num_keys": num_keys},
            {
                "HEADS": heads,
                "KV_HEADS": kv_heads,
                "LENGTH": length,
                "COLUMNS": block_columns,
                "ONE_FOR_ALL": places.shape[0] == 1,
                "HAS_STARTS": starts is not None,
                "ROWS": SCORES.rows,
                "KEYS": SCORES.keys,
            },
            (num_rows // SCORES.rows, heads, batch),
            SCORES,
        )
        found = (self.run or run_on_gpu)(call)
        return found["scores"], found["peak"]
