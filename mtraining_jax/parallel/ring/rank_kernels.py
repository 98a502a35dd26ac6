"""Kernel calls of one rank: its queries against keys and values of any rank."""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import Array

from mtraining_jax.parallel.ring.rank_plans import StepPlans, segment_pairs
from mtraining_jax.parallel.ring.topology import RingTopology
from pallas_kernels import ops as kernels

Pair = tuple[Array, Array]
State = list[Pair | None]  # running fp32 (output, lse) of each query segment; None if still empty


class RankKernels:
    """Runs planned steps on this rank's queries.

    Args:
        topology: the ring.
        q: [B, n, Hq, D], this rank's queries.
    """

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
    ) -> State:
        """Merges attention to the keys of one step into the running results.

        Args:
            plans: plans of the step.
            keys: keys and values of each key segment.
            columns: keys and values of gathered columns, if the plans have columns.
            state: running results.
            last: whether this call completes the results; casts the output to the query dtype.
        """
        state = list(state)
        for (i, j), plan in zip(self._pairs, plans, strict=True):
            final = last and i == j  # no later segment has work
            state[i] = kernels.forward(
                self.queries[i],
                *keys[j],
                plan,
                columns if plan.columns is not None else None,
                scale=self._scale,
                init=state[i],
                out_dtype=self.queries[i].dtype if final else jnp.float32,
                beside_transfers=True,
            )
        return state

    def backward(
        self,
        plans: StepPlans,
        keys: Sequence[Pair],
        columns: Pair | None,
        rows: tuple[Array, Array, Array],
        dq: list,
    ) -> tuple[list, list[Pair], Pair | None]:
        """Computes gradients from the keys of one step.

        Args:
            plans: plans of the step.
            keys, columns: as in `forward`.
            rows: gradient of the output [B, n, Hq, D]; lse and delta fp32 [B, Hq, n].
            dq: accumulated fp32 gradients of the query segments; None entries if still empty.

        Returns:
            dq; fp32 (dk, dv) of each key segment; column gradients or None.
        """
        dq, dkv, dcolumns = list(dq), self.empty_state(), None
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
            dq[i] = accumulate(dq[i], grads.dq)
            dkv[j] = accumulate(dkv[j], (grads.dk, grads.dv))
            if plan.columns is not None:
                dcolumns = accumulate(dcolumns, (grads.dk_columns, grads.dv_columns))
        return dq, dkv, dcolumns

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
    return tuple(jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True))
