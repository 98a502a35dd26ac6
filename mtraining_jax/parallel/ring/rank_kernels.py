"""Kernel calls of one rank: its queries against keys and values of any rank."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mtraining_jax.parallel.ring.rank_plans import StepPlans, segment_pairs
from mtraining_jax.parallel.ring.topology import RingTopology
from pallas_kernels import ops as kernels

Pair = tuple[Array, Array]
# Running fp32 (output, lse) of each query segment; None before the first step.
State = Sequence[Pair | None]


class RankKernels:
    """Runs planned steps on this rank's queries, [B, n, Hq, D]."""

    def __init__(self, topology: RingTopology, q: Array):
        self._scale = topology.scale
        self._pairs = segment_pairs(topology.layout)
        self._num_segments = len(topology.layout.segments(0))
        self.queries = self.split(q)

    def empty_state(self) -> list[None]:
        """Returns the state before the first call."""
        return [None] * self._num_segments

    def forward(
        self, plans: StepPlans, keys: Sequence[Pair], columns: Pair | None, state: State, last: bool
    ) -> list[Pair]:
        """Merges attention to the keys of one step into the running results.

        With `last`, this call completes the results and casts the output to the query dtype.
        """
        results: list[Any] = list(state)
        for (i, j), plan in zip(self._pairs, plans, strict=True):
            final = last and i == j  # no later segment has work
            results[i] = kernels.forward(
                self.queries[i],
                *keys[j],
                plan,
                columns if plan.columns is not None else None,
                scale=self._scale,
                init=results[i],
                out_dtype=self.queries[i].dtype if final else jnp.float32,
                beside_transfers=True,
            )
        return results

    def backward(
        self,
        plans: StepPlans,
        keys: Sequence[Pair],
        columns: Pair | None,
        rows: tuple[Array, Array, Array],
        dq: Sequence[Array | None],
    ) -> tuple[list[Array], list[Pair], Pair | None]:
        """Computes gradients from the keys of one step.

        Args:
            plans, keys, columns: as in `forward`.
            rows: gradient of the output [B, n, Hq, D]; lse and delta fp32 [B, Hq, n].
            dq: accumulated fp32 gradients of the query segments.

        Returns:
            dq; fp32 (dk, dv) of each key segment; column gradients or None.
        """
        dqs: list[Any] = list(dq)
        dkv: list[Any] = [None] * self._num_segments
        dcolumns: Any = None
        dout, lse, delta = (self.split(rows[0]), *(self.split(x, 2) for x in rows[1:]))
        for (i, j), plan in zip(self._pairs, plans, strict=True):
            grads = kernels.backward(
                self.queries[i],
                *keys[j],
                dout[i],
                lse[i],
                delta[i],
                plan,
                columns if plan.columns is not None else None,
                scale=self._scale,
                beside_transfers=True,
            )
            dqs[i] = accumulate(dqs[i], grads.dq)
            dkv[j] = accumulate(dkv[j], (grads.dk, grads.dv))
            if plan.columns is not None:
                dcolumns = accumulate(dcolumns, (grads.dk_columns, grads.dv_columns))
        return dqs, dkv, dcolumns

    def split(self, x: Array, axis: int = 1) -> list[Array]:
        """Splits a shard along its token axis into the rank's segments."""
        return jnp.split(x, self._num_segments, axis=axis)

    def split_segment_pairs(self, kv: Pair) -> list[Pair]:
        """Splits a shard's keys and values into segments."""
        return list(zip(*map(self.split, kv), strict=True))


def accumulate(total, share):
    """Adds two trees of arrays; `total` may be None for zero."""
    return share if total is None else jax.tree.map(jnp.add, total, share)


def join_segments(parts: Iterable[Pair]) -> Pair:
    """Concatenates per-segment gradients to those of the shard."""
    dk, dv = (jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True))
    return dk, dv
