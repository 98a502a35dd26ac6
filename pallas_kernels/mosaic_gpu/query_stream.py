"""Streams queries through shared memory, for backward kernels with thread blocks that own keys."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.common import TILE, WARPGROUPS, await_last, tiled


class QueryStream:
    """The copy side: keys and values once, then the queries and `rows` [B, Hq, nq] of each step."""

    def __init__(
        self,
        refs: dict[str, Any],
        smem: dict[str, Any],
        bars: dict[str, Any],
        rows: Sequence[str],
        first_key: Array | int = 0,  # of a block
    ):
        self.refs, self.smem, self.bars, self.rows = refs, smem, bars, rows
        self.first_key, self.keys = first_key, smem["k"].shape[0]
        self.stages, self.queries = smem["q"].shape[:2]

    def load_keys(self, batch: Array, block: Array, head: Array, suffix: str = "") -> None:
        """Loads keys and values of the operands k and v, or kc and vc with the suffix."""
        keys = pl.ds(block * TILE + self.first_key, self.keys)
        for name in ("k", "v"):
            plgpu.copy_gmem_to_smem(
                self.refs[name + suffix].at[batch, keys, head],
                self.smem[name],
                self.bars["keys_full"],
            )

    def load_block(self, batch: Array, head: Array, row_block: Array, step: Array) -> Array:
        parts = TILE // self.queries
        for part in range(parts):
            slot = lax.rem(step + part, self.stages)

            @pl.when(step + part >= self.stages)
            def _(slot: Array = slot) -> None:
                plgpu.barrier_wait(self.bars["free"].at[slot])

            rows = pl.ds(row_block * TILE + part * self.queries, self.queries)
            for name in ("q", "dout"):
                self._copy(self.refs[name].at[batch, rows, head], name, slot)
            for name in self.rows:
                self._copy(self.refs[name].at[batch, head, rows], name, slot)
        return step + parts

    def _copy(self, source: Any, name: str, slot: Array) -> None:
        plgpu.copy_gmem_to_smem(source, self.smem[name].at[slot], self.bars["full"].at[slot])

    def drain(self, steps: Array) -> None:
        await_last([self.bars["free"]], steps, self.stages)


def key_memory(
    stages: int, queries: int, head_dim: int, dtype: Any, rows: Sequence[str], keys: int = TILE
) -> dict[str, Any]:
    """Shared memory for a tile of keys and values, and for the steps in flight."""
    smem = {name: tiled((keys, head_dim), dtype) for name in ("k", "v")}
    smem |= {name: tiled((stages, queries, head_dim), dtype) for name in ("q", "dout")}
    smem |= {name: plgpu.SMEM((stages, queries), jnp.float32) for name in rows}
    return smem


def key_barriers(stages: int) -> dict[str, Any]:
    return {
        "keys_full": plgpu.Barrier(num_arrivals=2),
        "full": plgpu.Barrier(num_arrivals=4, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
    }
