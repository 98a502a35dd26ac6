"""Softmax masses of key blocks by a Triton kernel: `backends.BlockScores` before Hopper."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.checks import Shaped
from pallas_kernels.masses import LOG2E, masses_from_scores, unsupported_by_kernel
from pallas_kernels.triton.call import Call, run_on_gpu
from pallas_kernels.triton.configs import Config

_DEPTH = 64
# Selected like those of configs.py: by what the compiler reports for sm_80.
SCORES = Config(rows=64, keys=128, warps=4, stages=3)
# Two per multiprocessor of an A100, the limit of shared memory with head dim 64; not timed.
_PROGRAMS = 216


@dataclasses.dataclass(frozen=True)
class TritonBlockScores:
    """The Triton implementation of `pallas_kernels.backends.BlockScores`."""

    run: Callable[[Call], dict[str, Array]] | None = None  # None for jax-triton on a GPU

    def unsupported(self, q: Shaped, k: Shaped) -> str | None:
        return unsupported_by_kernel(q, k, depth=_DEPTH, width=SCORES.keys)

    def block_masses(
        self,
        q: Array,
        k: Array,
        places: Array,
        first_blocks: Array | None = None,
        *,
        scale: float,
        levels: bool = False,
    ) -> Array | tuple[Array, Array]:
        columns = k.shape[3]

        def score(
            rows: Array, keys: Array, seen: Array, begin: Array | None
        ) -> tuple[Array, Array]:
            return self._scores(rows, keys, seen, begin, scale, columns)

        return masses_from_scores(
            score,
            q,
            k,
            places,
            first_blocks,
            scale=scale,
            levels=levels,
            tile_rows=SCORES.rows,
            width=SCORES.keys,
            programs=_PROGRAMS,
        )

    def _scores(
        self, q: Array, k: Array, places: Array, starts: Array | None, scale: float, columns: int
    ) -> tuple[Array, Array]:
        """Implements `pallas_kernels.masses.Score` with the kernel."""
        from pallas_kernels.triton.kernels.block_scores import block_scores

        batch, heads, num_rows, length = q.shape
        kv_heads, num_keys = k.shape[1:3]
        shape = batch, heads, num_keys // columns, num_rows
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
                "COLUMNS": columns,
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
