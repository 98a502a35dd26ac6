"""The rings in which keys, values and their gradients pass from rank to rank.

Going once round all ranks of a mesh axis is a *turn*. Communication is arranged so that XLA can
hide it. What travels to the next step is sent on at the *top* of a step, as it arrived, before the
kernel that uses it: no transfer waits for a kernel of its own step. In the backward pass dk and dv
follow one step later for the same reason: the sums that a step sends are those of the step before,
and the kernel's share is added to what arrives.

By default XLA runs one collective at a time on GPUs. In a hierarchical ring a transfer between
nodes would then hide behind one kernel only. With `ring_compiler_options` it goes on during all
steps inside the node (as seen in the schedule that jax 0.11.2 compiles for 8 H200).
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.parallel.ordering import after
from mtraining_jax.parallel.ring.columns import fetch_columns, return_column_gradients
from mtraining_jax.parallel.ring.rank_kernels import Pair, RankKernels, State, join, plus
from mtraining_jax.parallel.ring.rank_plans import RankPlanner, StepPlans, step_of, steps_between
from mtraining_jax.parallel.ring.topology import RingTopology
from pallas_kernels.index import Index


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["steps", "first", "last", "column_positions"], meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class TurningPlans:
    """What a rank's kernels walk in both passes.

    Attributes:
        steps: of every step, without columns, with leading axes [outer size, inner size].
        first: of the first step, with columns, which the backward pass takes there, so that their
            gradients travel behind the steps that follow. None without columns.
        last: of the last step, with columns, which the forward pass takes there. None without.
        column_positions: where columns lie in this rank's shard, or None.
    """

    steps: StepPlans
    first: StepPlans | None
    last: StepPlans | None
    column_positions: Array | None


def plan_turning(topology: RingTopology, index: Index, q: Array, k: Array) -> TurningPlans:
    """Plans all steps of a turning ring; arguments as those of `RankPlanner`."""
    planner = RankPlanner(topology, index, q, k)

    def of_step(outer: Array | int, inner: Array | int, with_columns: bool = False) -> StepPlans:
        source = topology.source(planner.rank, outer, inner)
        return planner.on_segments(topology.layout.segments(source), with_columns)

    outer_steps = jnp.arange(topology.outer_size, dtype=jnp.int32)
    inner_steps = jnp.arange(topology.inner_size, dtype=jnp.int32)
    of_inner = jax.vmap(of_step, in_axes=(None, 0))
    steps = jax.vmap(of_inner, in_axes=(0, None))(outer_steps, inner_steps)
    first = last = None
    if planner.has_columns:
        first = of_step(0, 0, True)
        last = of_step(topology.outer_size - 1, topology.inner_size - 1, True)
    positions = planner.column_positions(jnp.asarray(planner.rank)[None])
    return TurningPlans(steps, first, last, positions)


def turning_forward(
    topology: RingTopology, plans: TurningPlans, q: Array, kv: Pair
) -> list[Pair]:
    """Output and lse of every query segment, by turning keys and values.

    Args:
        topology: of a ring of several ranks that does not gather.
        plans: from `plan_turning`.
        q: this rank's queries.
        kv: its keys and values.
    """
    kernels = RankKernels(topology, q)
    columns, kv = _columns_first(topology, plans, kv)

    def attend(step: StepPlans, kv: Pair, state: State, last: bool) -> State:
        if last and plans.last is not None:
            step = plans.last
        return kernels.forward(step, kernels.split_pair(kv), columns, state, last)

    def inner_turn(steps: StepPlans, kv: Pair, state: State, last: bool) -> State:
        return _turn(
            topology.inner_size, topology.shift_inner, steps, kv, state,
            lambda step, kv, state, end: attend(step, kv, state, last and end),
        )

    state = [_nothing_yet(x) for x in kernels.queries]  # loops carry arrays
    return _turn(topology.outer_size, topology.shift_outer, plans.steps, kv, state, inner_turn)


def turning_backward(
    topology: RingTopology, plans: TurningPlans, q: Array, kv: Pair,
    rows: tuple[Array, Array, Array],
) -> tuple[list[Array], Pair]:
    """Gradients by turning keys and values, and gradients with them.

    Args:
        topology: as in `turning_forward`, like the next three.
        plans: those of the forward pass.
        q: this rank's queries.
        kv: its keys and values.
        rows: as in `RankKernels.backward`.

    Returns:
        dq of every query segment; (dk, dv) of this rank's keys and values; all fp32.
    """
    kernels = RankKernels(topology, q)
    columns, kv = _columns_first(topology, plans, kv)

    def differentiate(step: StepPlans, kv: Pair, dq: list, first: bool):
        if first and plans.first is not None:
            step = plans.first
        dq, dkv, dcolumns = kernels.backward(step, kernels.split_pair(kv), columns, rows, dq)
        return dq, join(dkv), dcolumns

    def inner_turn(steps: StepPlans, kv: Pair, dq: list, first: bool):
        return _turn_back(
            topology.inner_size, topology.shift_inner, steps, kv, dq,
            lambda step, kv, dq, begin: differentiate(step, kv, dq, first and begin),
        )

    dq, dkv, dcolumns = _turn_back(
        topology.outer_size, topology.shift_outer, plans.steps, kv, kernels.nothing(), inner_turn
    )
    if dcolumns is not None:
        dcolumns = after(dcolumns, dkv[0])
        dkv = return_column_gradients(
            dkv, dcolumns, plans.column_positions, topology.axis_names
        )
    return dq, dkv


def _columns_first(
    topology: RingTopology, plans: TurningPlans, kv: Pair
) -> tuple[Pair | None, Pair]:
    """Fetches the columns, and keeps the ring from starting before where that matters."""
    if plans.column_positions is None:
        return None, kv
    columns = fetch_columns(kv, plans.column_positions, topology.axis_names)
    return columns, after(kv, columns[0])


def _nothing_yet(q: Array) -> Pair:
    """The running output and lse of queries before the first step."""
    lse = jnp.full((q.shape[0], q.shape[2], q.shape[1]), -jnp.inf, jnp.float32)
    return jnp.zeros(q.shape, jnp.float32), lse


def _turn(
    size: int, shift: Callable, steps: StepPlans, kv: Pair, state: State, visit: Callable
) -> State:
    """One turn of keys and values over an axis: `size` visits, size - 1 hops.

    Args:
        size: ranks on the axis.
        shift: sends a tree of arrays one rank on.
        steps: plans of every visit, stacked.
        kv: keys and values of this rank.
        state: what visits update.
        visit: (plans, kv, state, whether it is the last) -> state.
    """

    def body(carry, step):
        kv, state = carry
        arriving = shift(kv)
        return (arriving, visit(step, kv, state, False)), None

    if size > 1:
        (kv, state), _ = lax.scan(body, (kv, state), steps_between(steps, 0, size - 1))
    return visit(step_of(steps, size - 1), kv, state, True)


def _turn_back(
    size: int, shift: Callable, steps: StepPlans, kv: Pair, dq: list, visit: Callable
):
    """One turn of keys, values and the gradients that they collect.

    Args:
        size: as in `_turn`, like the next three.
        shift: sends a tree of arrays one rank on.
        steps: plans of every visit, stacked.
        kv: keys and values of this rank.
        dq: gradients of the queries, which visits add to.
        visit: (plans, kv, dq, whether it is the first) -> dq, this rank's share of (dk, dv) of
            the visiting keys and values, and gradients of columns or None.

    Returns:
        dq; (dk, dv) of this rank's own keys and values; gradients of columns or None.
    """
    first = step_of(steps, 0)
    if size == 1:
        return visit(first, kv, dq, True)
    arriving = shift(kv)
    dq, dkv, columns = visit(first, kv, dq, True)

    def body(carry, step):
        kv, dkv, dq = carry
        arriving, collected = shift((kv, dkv))
        dq, share, _ = visit(step, kv, dq, False)
        return (arriving, plus(collected, share), dq), None

    kv, dkv, dq = arriving, dkv, dq
    if size > 2:
        (kv, dkv, dq), _ = lax.scan(body, (kv, dkv, dq), steps_between(steps, 1, size - 1))
    collected = shift(dkv)
    dq, share, _ = visit(step_of(steps, size - 1), kv, dq, False)
    return dq, shift(plus(collected, share)), columns
