"""Steps of one rank: plans and kernel calls for its queries and the keys that it visits."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.ring.topology import RingAxis, RingTopology
from pallas_kernels import ops as kernels
from pallas_kernels.checks import Shaped
from pallas_kernels.index import Segment, TiledIndex
from pallas_kernels.interface import Plan

Pair = tuple[Array, Array]
StepPlans = tuple[Plan, ...]  # plans of one step, one per entry of `segment_pairs`
# Running fp32 (output, lse) of each query segment; None before the first step.
State = Sequence[Pair | None]


class AxisSteps(NamedTuple):
    """Plans of all steps of an axis; each is a `StepPlans`, or a turn of the next axis."""

    first: Any
    later: Any  # the steps after the first, stacked

    def middle(self) -> Any:
        """The steps between the first and the last, stacked."""
        return jax.tree.map(lambda x: x[:-1], self.later)

    def last(self) -> Any:
        return jax.tree.map(lambda x: x[-1], self.later)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RingPlans:
    """Work lists of a rank's kernels for both passes.

    Columns are computed by the last step of the forward pass and the first one of the backward
    pass. These have plans with columns of their own, unless there is only one step.
    """

    own: StepPlans | None  # the rank's own keys, if processed separately from those of its group
    steps: Any  # a turn of the slowest rotating axis, or the only step
    first_with_columns: StepPlans | None
    last_with_columns: StepPlans | None
    column_positions: Array | None  # in the shards of the rank's group


@jax.named_scope("ring_plans")
def plan_ring(topology: RingTopology, index: TiledIndex, q: Shaped, k: Shaped) -> RingPlans:
    """Plans all steps of a ring from an index as in `ring_attention`, and shapes of q and k."""
    layout, rank = topology.layout, topology.rank()
    queries = layout.segments(rank)
    rows = layout.block_ids(rank)
    q_segment = jax.ShapeDtypeStruct(
        (q.shape[0], q.shape[1] // len(queries), *q.shape[2:]), q.dtype
    )
    shards = index.shards(q.shape[0], q.shape[2], queries[0].stride, layout.num_blocks, rows)
    tokens = index.column_tokens(topology.every_row)
    columns = [index.columns(segment, layout.num_blocks, tokens, rows) for segment in queries]

    def plan_call(tiles: Any, num_key_blocks: int, columns: Any) -> Plan:
        shape = k.shape[0], num_key_blocks * layout.block_size, *k.shape[2:]
        keys = jax.ShapeDtypeStruct(shape, k.dtype)
        return kernels.plan(q_segment, keys, tiles, columns, backend=topology.backend)

    def plan_segments(keys: Sequence[Segment], with_columns: bool) -> StepPlans:
        # The first call of each query segment also computes the columns.
        return tuple(
            plan_call(
                shards.pair(queries[i], keys[j]),
                keys[j].num_blocks,
                columns[i] if with_columns and j == 0 else None,
            )
            for i, j in segment_pairs(layout)
        )

    def plan_step(*steps: Array | int, with_columns: bool = False) -> StepPlans:
        ranks = topology.sources(rank, *steps)
        if not topology.local_first:
            return plan_segments(_group_segments(layout, ranks), with_columns)
        (query,), (keys,) = queries, layout.segments(ranks)
        own_here = all(isinstance(step, int) and step == 0 for step in steps)
        tiles = shards.gathered(query, jnp.asarray(keys.first_block), own_here)
        column = columns[0] if with_columns else None
        return (plan_call(tiles, ranks.shape[0] * keys.num_blocks, column),)

    def plan_turn(axes: Sequence[RingAxis], *steps: Array | int) -> Any:
        if not axes:
            return plan_step(*steps, with_columns=not steps)
        later = jnp.arange(1, axes[0].size, dtype=jnp.int32)
        return AxisSteps(
            plan_turn(axes[1:], *steps, 0),
            jax.vmap(lambda step: plan_turn(axes[1:], *steps, step))(later),
        )

    first = last = positions = None
    if tokens is not None:
        zeros = [0] * len(topology.rotating)
        positions = layout.gathered_positions(tokens, topology.sources(rank, *zeros))
        if zeros:
            first = plan_step(*zeros, with_columns=True)
            last = plan_step(*(axis.size - 1 for axis in topology.rotating), with_columns=True)
    own = plan_segments(layout.segments(rank), False) if topology.local_first else None
    return RingPlans(own, plan_turn(topology.rotating), first, last, positions)


def segment_pairs(layout: Layout) -> list[tuple[int, int]]:
    """Lists pairs (query segment, key segment) with causal work on some pair of ranks."""
    # Segment i of any rank precedes segment i + 1 of any rank, so later key segments have none.
    count = len(layout.segments(0))
    return [(i, j) for i in range(count) for j in range(i + 1)]


def _group_segments(layout: Layout, ranks: Array) -> list[Segment]:
    """Returns the key segments of a group, merged from adjacent chunks; see `Transfers`."""
    return [
        Segment(jnp.min(segment.first_block), segment.stride, ranks.shape[0] * segment.num_blocks)
        for segment in layout.segments(ranks)
    ]


class RankKernels:
    """Runs planned steps on this rank's queries, [B, n, Hq, D]."""

    def __init__(self, topology: RingTopology, q: Array):
        self._options = {"scale": topology.scale, "overlaps_collectives": True}
        self._pairs = segment_pairs(topology.layout)
        self.num_segments = len(topology.layout.segments(0))
        self._queries = self._split(q)

    def forward(
        self, plans: StepPlans, keys: Sequence[Pair], columns: Pair | None, state: State, last: bool
    ) -> list[Pair]:
        """Merges attention to the keys of one step into the results; `last` completes them."""
        results: list[Any] = list(state)
        for (i, j), plan in zip(self._pairs, plans, strict=True):
            final = last and i == j  # no later segment has work
            results[i] = kernels.forward(
                self._queries[i],
                *keys[j],
                plan,
                columns if plan.columns is not None else None,
                init=results[i],
                out_dtype=self._queries[i].dtype if final else jnp.float32,
                **self._options,
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
        """Computes fp32 gradients from the keys of one step.

        `rows` are the gradient of the output, lse and delta. Returns accumulated dq of the query
        segments, (dk, dv) of each key segment, and column gradients or None.
        """
        dqs: list[Any] = list(dq)
        dkv: list[Any] = [None] * self.num_segments
        dcolumns: Any = None
        dout, lse, delta = (self._split(rows[0]), *(self._split(x, 2) for x in rows[1:]))
        for (i, j), plan in zip(self._pairs, plans, strict=True):
            grads = kernels.backward(
                self._queries[i],
                *keys[j],
                dout[i],
                lse[i],
                delta[i],
                plan,
                columns if plan.columns is not None else None,
                **self._options,
            )
            dqs[i] = accumulate(dqs[i], grads.dq)
            dkv[j] = accumulate(dkv[j], (grads.dk, grads.dv))
            if plan.columns is not None:
                dcolumns = accumulate(dcolumns, (grads.dk_columns, grads.dv_columns))
        return dqs, dkv, dcolumns

    def _split(self, x: Array, axis: int = 1) -> list[Array]:
        return jnp.split(x, self.num_segments, axis=axis)


def accumulate(total: Any, share: Any) -> Any:
    """Adds two trees of arrays; None is zero."""
    if total is None or share is None:
        return share if total is None else total
    return jax.tree.map(jnp.add, total, share)
