"""Scores of key blocks by the last queries by Triton kernels: `backends.Estimate` before Hopper."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.checks import Shaped
from pallas_kernels.masses import LOG2E
from pallas_kernels.triton.call import Call, run_on_gpu
from pallas_kernels.triton.configs import Config

NUM_QUERIES = 64
_BLOCK = 128
# For both kernels; selected like those of configs.py, by what the compiler reports for sm_80.
CONFIG = Config(rows=NUM_QUERIES, keys=_BLOCK, warps=4, stages=3)


@dataclasses.dataclass(frozen=True)
class TritonEstimate:
    """The Triton implementation of `pallas_kernels.backends.Estimate`."""

    run: Callable[[Call], dict[str, Array]] | None = None  # None for jax-triton on a GPU

    def unsupported(self, q: Shaped) -> str | None:
        if q.shape[2] == NUM_QUERIES:
            return None
        return f"{q.shape[2]} last queries (must be {NUM_QUERIES})"

    def block_statistics(
        self,
        q: Array,
        k: Array,
        block_ids: Array,
        num_blocks: int,
        *,
        scale: float,
        valid_len: Array | None = None,
        queries: Array | None = None,
    ) -> tuple[Array, Array]:
        from pallas_kernels.triton.kernels.estimate import estimate_statistics

        shape = k.shape[0], q.shape[1], block_ids.shape[0], NUM_QUERIES
        arrays = {"q": q, "k": k, **_places(k, block_ids, num_blocks, valid_len, queries)}
        found = self._over_blocks(estimate_statistics, arrays, ("peak", "total"), shape, scale)
        return found["peak"], found["total"]

    def block_masses(
        self,
        q: Array,
        k: Array,
        block_ids: Array,
        num_blocks: int,
        peak: Array,
        to_mass: Array,
        *,
        scale: float,
        valid_len: Array | None = None,
        queries: Array | None = None,
    ) -> tuple[Array, Array, Array]:
        from pallas_kernels.triton.kernels.estimate import estimate_masses

        shape = k.shape[0], q.shape[1], block_ids.shape[0], _BLOCK
        arrays = {"q": q, "k": k, **_places(k, block_ids, num_blocks, valid_len, queries)}
        arrays |= {"peak": peak, "to_mass": to_mass}
        names = "columns", "own_diagonals", "beyond"
        found = self._over_blocks(estimate_masses, arrays, names, shape, scale)
        return found["columns"], found["own_diagonals"], found["beyond"]

    def _over_blocks(
        self,
        kernel: Any,
        arrays: dict[str, Array],
        names: tuple[str, ...],
        shape: tuple[int, ...],
        scale: float,
    ) -> dict[str, Array]:
        """Runs a kernel with one program per key block and key/value head; returns its outputs."""
        q, k = arrays["q"], arrays["k"]
        call = Call(
            kernel,
            arrays,
            dict.fromkeys(names, jax.ShapeDtypeStruct(shape, jnp.float32)),
            {"log2_scale": float(scale) * LOG2E},
            {
                "HEADS": q.shape[1],
                "KV_HEADS": k.shape[2],
                "DIM": q.shape[3],
                "ROWS": CONFIG.rows,
                "KEYS": CONFIG.keys,
            },
            (k.shape[0] * k.shape[2], shape[2]),
            CONFIG,
        )
        return (self.run or run_on_gpu)(call)


def _places(
    k: Array, block_ids: Array, num_blocks: int, valid_len: Array | None, queries: Array | None
) -> dict[str, Array]:
    """Returns the positions of each block's queries, and their query set, as kernel arguments."""
    batch = k.shape[0]
    end = jnp.asarray(num_blocks * _BLOCK if valid_len is None else valid_len)
    shifts = end.reshape(-1, 1) - NUM_QUERIES - block_ids * _BLOCK
    if queries is None:
        queries = jnp.arange(batch, dtype=jnp.int32)
    shifts = jnp.broadcast_to(shifts.astype(jnp.int32), (batch, block_ids.shape[0]))
    return {"shifts": shifts, "queries": queries}
