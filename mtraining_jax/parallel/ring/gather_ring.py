"""Ring attention in which the devices of a node all-gather their keys and values.

With few key/value heads, those of a whole node are small. A single kernel call replaces a ring
inside the node and keeps its running output and lse on chip. Between nodes each device forwards
only its own shard, which is gathered on arrival, so no byte crosses the slow links twice.

XLA can hide the communication: the first gather overlaps with the work on the rank's own shard
(in the striped layout, where that work is separate), and the next node's shard travels while the
kernel works on the current one. The backward pass returns gradients one step late.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.parallel.ordering import depend_on
from mtraining_jax.parallel.ring.columns import fetch_columns, return_column_gradients
from mtraining_jax.parallel.ring.rank_kernels import (
    Pair,
    RankKernels,
    State,
    accumulate,
    join_segments,
)
from mtraining_jax.parallel.ring.rank_plans import RankPlanner, StepPlans, step_of, steps_between
from mtraining_jax.parallel.ring.topology import RingTopology
from pallas_kernels.index import Index, Segment


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "own",
        "first",
        "later",
        "first_with_columns",
        "last_with_columns",
        "column_positions",
    ],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class GatherPlans:
    """Work lists of a rank's kernels for both passes; one step covers the keys of one node.

    Attributes:
        own: the rank's own keys, if processed separately from the node's; else None.
        first: the first step; with columns if it is the only step.
        later: the other steps, stacked; None if there are none.
        first_with_columns: the first step of the backward pass with columns, so that column
            gradients travel during the following steps. None if `first` is used instead.
        last_with_columns: the last step of the forward pass with columns, when the columns of
            other nodes have arrived. None if `first` or `later` is used instead.
        column_positions: positions of columns in the node's shards, or None.
    """

    own: StepPlans | None
    first: StepPlans
    later: StepPlans | None
    first_with_columns: StepPlans | None
    last_with_columns: StepPlans | None
    column_positions: Array | None

    @property
    def forward_last(self) -> StepPlans:
        """The last step of the forward pass."""
        if self.last_with_columns is not None:
            return self.last_with_columns
        return self.first if self.later is None else step_of(self.later, -1)

    @property
    def backward_first(self) -> StepPlans:
        """The first step of the backward pass."""
        return self.first if self.first_with_columns is None else self.first_with_columns


def plan_gathering(topology: RingTopology, index: Index, q: Array, k: Array) -> GatherPlans:
    """Plans all steps of a gather ring; arguments as in `RankPlanner`."""
    layout = topology.layout
    planner = RankPlanner(topology, index, q, k)
    own_apart = _own_apart(topology)

    def of_node(step: Array | int, with_columns: bool) -> StepPlans:
        ranks = topology.node_ranks(planner.rank, step)
        if own_apart:
            own_here = isinstance(step, int) and step == 0
            return planner.on_stripes(ranks, with_columns, skip_own=own_here)
        return planner.on_segments(_node_segments(topology, ranks), with_columns)

    own = planner.on_segments(layout.segments(planner.rank), False) if own_apart else None
    positions = planner.column_positions(topology.node_ranks(planner.rank, 0))
    size = topology.outer_size
    if size == 1:
        return GatherPlans(own, of_node(0, True), None, None, None, positions)
    steps = jnp.arange(1, size, dtype=jnp.int32)
    later = jax.vmap(functools.partial(of_node, with_columns=False))(steps)
    first = last = None
    if planner.has_columns:
        first, last = of_node(0, True), of_node(size - 1, True)
    return GatherPlans(own, of_node(0, False), later, first, last, positions)


def gather_forward(topology: RingTopology, plans: GatherPlans, q: Array, kv: Pair) -> list[Pair]:
    """Computes (output, lse) of every query segment from this rank's queries, keys and values."""
    node, kernels = _Node(topology), RankKernels(topology, q)
    here = node.gather(kv)
    state: State = kernels.empty_state()
    if plans.own is not None:
        state = kernels.forward(plans.own, [kv], None, state, last=False)
    # Columns are not needed before the last step. Without the barrier, their sum over nodes would
    # make the first kernel wait for the gather.
    source = lax.optimization_barrier((here, state))[0] if topology.outer_axes else here
    columns, kv = node.columns_first(plans, kv, source)

    def visit(step: StepPlans, here: Pair, state: State, last: bool) -> list[Pair]:
        return kernels.forward(step, node.key_segments(here), columns, state, last)

    if plans.later is None:
        return visit(plans.forward_last, here, state, True)

    def body(carry, step):
        kv, here, state = carry
        kv, arriving = node.next(kv)
        return (kv, arriving, visit(step, here, state, False)), None

    (kv, here, state), _ = body((kv, here, state), plans.first)
    between = topology.outer_size - 2
    if between:
        (kv, here, state), _ = lax.scan(
            body, (kv, here, state), steps_between(plans.later, 0, between)
        )
    return visit(plans.forward_last, here, state, True)


def gather_backward(
    topology: RingTopology, plans: GatherPlans, q: Array, kv: Pair, rows: tuple[Array, Array, Array]
) -> tuple[list[Array], Pair]:
    """Computes the gradients; `rows` as in `RankKernels.backward`.

    Returns:
        dq of every query segment; (dk, dv) of this rank's keys and values; all fp32.
    """
    node, kernels = _Node(topology), RankKernels(topology, q)
    here = node.gather(kv)
    dq, collected = kernels.empty_state(), None
    if plans.own is not None:
        dq, own, _ = kernels.backward(plans.own, [kv], None, rows, dq)
        # The barrier puts dk and dv of the rank's own keys first, so that the gather overlaps
        # with them. XLA would choose the opposite order.
        here, collected = lax.optimization_barrier((here, join_segments(own)))
    columns, kv = node.columns_first(plans, kv, here)

    def visit(step: StepPlans, here: Pair, dq: list):
        keys = node.key_segments(here)
        dq, dkv, dcolumns = kernels.backward(step, keys, columns, rows, dq)
        return dq, node.restore(dkv), dcolumns

    if plans.later is not None:
        kv, arriving = node.next(kv)
    dq, shares, dcolumns = visit(plans.backward_first, here, dq)
    if dcolumns is not None and plans.column_positions is not None:
        if topology.outer_axes:
            dcolumns = depend_on(dcolumns, shares[0])
        shares = return_column_gradients(
            shares, dcolumns, plans.column_positions, topology.outer_axes
        )
    if plans.later is None:
        return dq, accumulate(collected, node.scatter(shares))

    def body(carry, step):
        kv, here, collected, shares, dq = carry
        # Send the gradients of the previous step home, together with their keys and values.
        collected = topology.shift_outer(accumulate(collected, node.scatter(shares)))
        kv, arriving = node.next(kv)
        dq, shares, _ = visit(step, here, dq)
        return (kv, arriving, collected, shares, dq), None

    here = arriving
    if collected is None:
        collected = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), kv)
    between = topology.outer_size - 2
    if between:
        (kv, here, collected, shares, dq), _ = lax.scan(
            body, (kv, here, collected, shares, dq), steps_between(plans.later, 0, between)
        )
    collected = topology.shift_outer(accumulate(collected, node.scatter(shares)))
    dq, shares, _ = visit(step_of(plans.later, -1), here, dq)
    return dq, topology.shift_outer(accumulate(collected, node.scatter(shares)))


def _own_apart(topology: RingTopology) -> bool:
    """Whether the work on a rank's own keys is separate from that on the rest of its node.

    In the striped layout the residue of a diagonal identifies it; in others it does not.
    """
    return topology.layout.kind == "striped"


def _node_segments(topology: RingTopology, ranks: Array) -> list[Segment]:
    """Returns the key segments of a node, merged from adjacent chunks; see `key_segments`."""
    size = topology.inner_size
    return [
        Segment(jnp.min(segment.first_block), segment.stride, size * segment.num_blocks)
        for segment in topology.layout.segments(ranks)
    ]


class _Node:
    """The shards of a node, treated as one."""

    def __init__(self, topology: RingTopology):
        self.topology = topology
        self._num_segments = len(topology.layout.segments(0))

    def gather(self, kv: Pair) -> Pair:
        """Concatenates [B, n, Hk, D] of all devices of the node along the tokens."""
        axes = self.topology.inner_axes
        return jax.tree.map(lambda x: lax.all_gather(x, axes, axis=1, tiled=True), kv)

    def scatter(self, shares: Pair) -> Pair:
        """Reduce-scatters the gradients of the gathered arrays to this device's part."""
        axes = self.topology.inner_axes
        return jax.tree.map(
            lambda x: lax.psum_scatter(x, axes, scatter_dimension=1, tiled=True), shares
        )

    def next(self, kv: Pair) -> tuple[Pair, Pair]:
        """Returns the shard of the same device of the next node, and all shards of that node."""
        kv = self.topology.shift_outer(kv)
        return kv, self.gather(kv)

    def columns_first(self, plans: GatherPlans, kv: Pair, here: Pair) -> tuple[Pair | None, Pair]:
        """Fetches the columns; holds back the shard to send until then where needed."""
        columns, axes = None, self.topology.outer_axes
        if plans.column_positions is not None:
            columns = fetch_columns(here, plans.column_positions, axes)
        if not axes:
            return columns, kv
        return columns, depend_on(kv, here[0] if columns is None else columns[0])

    def key_segments(self, here: Pair) -> list[Pair]:
        """Returns the node's key segments; in a zigzag layout the second ones are reversed."""
        if self._num_segments == 1:
            return [here]
        return list(zip(*map(self._arrange, here), strict=True))

    def restore(self, dkv: list[Pair]) -> Pair:
        """Reorders the gradients of key segments into the order of `gather`."""
        if len(dkv) == 1:
            return dkv[0]
        size = self.topology.inner_size

        def interleave(first: Array, second: Array) -> Array:
            first, second = (x.reshape(x.shape[0], size, -1, *x.shape[2:]) for x in (first, second))
            both = jnp.stack([first, jnp.flip(second, axis=1)], axis=2)
            return both.reshape(both.shape[0], -1, *both.shape[4:])

        return jax.tree.map(interleave, *dkv)

    def _arrange(self, x: Array) -> list[Array]:
        size = self.topology.inner_size
        parts = x.reshape(x.shape[0], size, self._num_segments, -1, *x.shape[2:])
        first, second = parts[:, :, 0], jnp.flip(parts[:, :, 1], axis=1)
        return [part.reshape(x.shape[0], -1, *x.shape[2:]) for part in (first, second)]
