"""The kernel calls of one rank: its queries against keys and values that come from others."""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import Array

from mtraining_jax.parallel.ring.rank_plans import StepPlans, segment_pairs
from mtraining_jax.parallel.ring.topology import RingTopology
from pallas_kernels import ops as kernels

Pair = tuple[Array, Array]
State = list[Pair | None]  # running (output, lse) of each query segment, fp32; None: nothing yet


class RankKernels:
    """Executes the plans of steps on this rank's queries.

    Args:
        topology: of the ring.
        q: [B, n, Hq, D], this rank's queries.
    """

    def __init__(self, topology: RingTopology, q: Array):
        self._scale = topology.scale
        self._pairs = segment_pairs(topology.layout)
        self._num_segments = len(topology.layout.segments(0))
        self.queries = self.split(q)

    def nothing(self) -> list[None]:
        """The running results before the first call."""
        return [None] * self._num_segments

    def forward(
        self, plans: StepPlans, keys: Sequence[Pair], columns: Pair | None, state: State,
        last: bool,
    ) -> State:
        """Merges attention to the keys of one step into the running results.

        Args:
            plans: of the step.
            keys: keys and values of each key segment.
            columns: those of gathered columns, where the plans have columns.
            state: the results so far.
            last: whether the results are final, with the output in the dtype of the queries.
        """
        state = list(state)
        for (i, j), plan in zip(self._pairs, plans, strict=True):
            final = last and i == j  # no later segment has work
            state[i] = kernels.forward(
                self.queries[i], *keys[j], plan, columns if plan.columns is not None else None,
                scale=self._scale, init=state[i],
                out_dtype=self.queries[i].dtype if final else jnp.float32,
                beside_transfers=True,
            )
        return state

    def backward(
        self, plans: StepPlans, keys: Sequence[Pair], columns: Pair | None,
        rows: tuple[Array, Array, Array], dq: list,
    ) -> tuple[list, list[Pair], Pair | None]:
        """Gradients from the keys of one step.

        Args:
            plans: of the step.
            keys: as in `forward`.
            columns: as in `forward`.
            rows: gradient of the output [B, n, Hq, D]; lse and delta fp32 [B, Hq, n].
            dq: fp32 gradients of the query segments so far, or None for nothing yet.

        Returns:
            dq; fp32 (dk, dv) of each key segment; gradients of columns or None.
        """
        dq, dkv, dcolumns = list(dq), self.nothing(), None
        dout, lse, delta = (self.split(rows[0]), *(self.split(x, 2) for x in rows[1:]))
        for (i, j), plan in zip(self._pairs, plans, strict=True):
            grads = kernels.backward(
                self.queries[i], *keys[j], dout[i], lse[i], delta[i], plan,
                columns if plan.columns is not None else None,
                scale=self._scale, beside_transfers=True,
            )
            dq[i] = plus(dq[i], grads.dq)
            dkv[j] = plus(dkv[j], (grads.dk, grads.dv))
            if plan.columns is not None:
                dcolumns = plus(dcolumns, (grads.dk_columns, grads.dv_columns))
        return dq, dkv, dcolumns

    def split(self, x: Array, axis: int = 1) -> list[Array]:
        """The parts of a shard along its token axis that belong to the rank's segments."""
        return jnp.split(x, self._num_segments, axis=axis)

    def split_pair(self, kv: Pair) -> list[Pair]:
        """Keys and values of each segment of a rank's shard."""
        return list(zip(*map(self.split, kv), strict=True))


def plus(total, share):
    """The sum of two trees of arrays, of which the first may be None for nothing yet."""
    return share if total is None else jax.tree.map(jnp.add, total, share)


def join(parts: Iterable[Pair]) -> Pair:
    """Gradients of the segments of a shard as those of the shard."""
    return tuple(jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True))
