"""Rings in which keys, values and their gradients pass from rank to rank.

XLA can hide the communication: data for the next step is sent at the *beginning* of a step, before
the kernel that uses it. For the same reason dk and dv follow one step later in the backward pass:
a step sends the sums of the previous step, and the kernel's contribution is added to what arrives.

By default XLA runs one collective at a time on GPUs, so in a hierarchical ring a transfer between
nodes would overlap only one kernel. With `ring_compiler_options` it overlaps all steps inside the
node (as seen in the schedule that jax 0.11.2 compiles for 8 H200).
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.parallel.ordering import depend_on
from mtraining_jax.parallel.ring.columns import fetch_columns, return_column_gradients
from mtraining_jax.parallel.ring.rank_kernels import Pair, RankKernels, accumulate, join_segments
from mtraining_jax.parallel.ring.rank_plans import RankPlanner, StepPlans, step_of, steps_between
from mtraining_jax.parallel.ring.topology import RingTopology
from pallas_kernels.index import Index


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["steps", "first", "last", "column_positions"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class RotationPlans:
    """Work lists of a rank's kernels for both passes.

    Attributes:
        steps: every step, without columns, with leading axes [outer size, inner size].
        first: the first step of the backward pass with columns, so that column gradients travel
            during the following steps. None without columns.
        last: the last step of the forward pass with columns. None without columns.
        column_positions: positions of columns in this rank's shard, or None.
    """

    steps: StepPlans
    first: StepPlans | None
    last: StepPlans | None
    column_positions: Array | None


def plan_rotation(topology: RingTopology, index: Index, q: Array, k: Array) -> RotationPlans:
    """Plans all steps of a turning ring; arguments as in `RankPlanner`."""
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
    return RotationPlans(steps, first, last, positions)


def rotate_forward(topology: RingTopology, plans: RotationPlans, q: Array, kv: Pair) -> list[Pair]:
    """Computes (output, lse) of every query segment from this rank's queries, keys and values."""
    kernels = RankKernels(topology, q)
    columns, kv = _columns_first(topology, plans, kv)

    def attend(step: StepPlans, kv: Pair, state: list[Pair], last: bool) -> list[Pair]:
        if last and plans.last is not None:
            step = plans.last
        return kernels.forward(step, kernels.split_segment_pairs(kv), columns, state, last)

    def rotate_inner(steps: StepPlans, kv: Pair, state: list[Pair], last: bool) -> list[Pair]:
        return _rotate(
            topology.inner_size,
            topology.shift_inner,
            steps,
            kv,
            state,
            lambda step, kv, state, end: attend(step, kv, state, last and end),
        )

    state = [_empty_state(x) for x in kernels.queries]  # loop carries must be arrays
    return _rotate(topology.outer_size, topology.shift_outer, plans.steps, kv, state, rotate_inner)


def rotate_backward(
    topology: RingTopology,
    plans: RotationPlans,
    q: Array,
    kv: Pair,
    rows: tuple[Array, Array, Array],
) -> tuple[list[Array], Pair]:
    """Computes the gradients, which travel with their keys; `rows` as in `RankKernels.backward`.

    Returns:
        dq of every query segment; (dk, dv) of this rank's keys and values; all fp32.
    """
    kernels = RankKernels(topology, q)
    columns, kv = _columns_first(topology, plans, kv)

    def differentiate(step: StepPlans, kv: Pair, dq: list, first: bool):
        if first and plans.first is not None:
            step = plans.first
        dq, dkv, dcolumns = kernels.backward(
            step, kernels.split_segment_pairs(kv), columns, rows, dq
        )
        return dq, join_segments(dkv), dcolumns

    def rotate_inner(steps: StepPlans, kv: Pair, dq: list, first: bool):
        return _rotate_back(
            topology.inner_size,
            topology.shift_inner,
            steps,
            kv,
            dq,
            lambda step, kv, dq, begin: differentiate(step, kv, dq, first and begin),
        )

    dq, dkv, dcolumns = _rotate_back(
        topology.outer_size,
        topology.shift_outer,
        plans.steps,
        kv,
        kernels.empty_state(),
        rotate_inner,
    )
    if dcolumns is not None and plans.column_positions is not None:
        dcolumns = depend_on(dcolumns, dkv[0])
        dkv = return_column_gradients(dkv, dcolumns, plans.column_positions, topology.axis_names)
    return dq, dkv


def _columns_first(
    topology: RingTopology, plans: RotationPlans, kv: Pair
) -> tuple[Pair | None, Pair]:
    """Fetches the columns; holds back the start of the ring until then where needed."""
    if plans.column_positions is None:
        return None, kv
    columns = fetch_columns(kv, plans.column_positions, topology.axis_names)
    return columns, depend_on(kv, columns[0])


def _empty_state(q: Array) -> Pair:
    """Returns the running output and lse before the first step."""
    lse = jnp.full((q.shape[0], q.shape[2], q.shape[1]), -jnp.inf, jnp.float32)
    return jnp.zeros(q.shape, jnp.float32), lse


def _rotate(
    size: int, shift: Callable, steps: StepPlans, kv: Pair, state: list[Pair], visit: Callable
) -> list[Pair]:
    """Runs one turn over an axis: `size` calls visit(plans, kv, state, last) and size - 1 hops."""

    def body(carry, step):
        kv, state = carry
        arriving = shift(kv)
        return (arriving, visit(step, kv, state, False)), None

    if size > 1:
        (kv, state), _ = lax.scan(body, (kv, state), steps_between(steps, 0, size - 1))
    return visit(step_of(steps, size - 1), kv, state, True)


def _rotate_back(size: int, shift: Callable, steps: StepPlans, kv: Pair, dq: list, visit: Callable):
    """Runs one turn of keys, values and the gradients that they collect.

    `visit` maps (plans, kv, dq, first) to dq, this rank's contribution to (dk, dv) of the visiting
    keys and values, and column gradients or None. Returns the same for this rank's own keys.
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
        return (arriving, accumulate(collected, share), dq), None

    kv, dkv, dq = arriving, dkv, dq
    if size > 2:
        (kv, dkv, dq), _ = lax.scan(body, (kv, dkv, dq), steps_between(steps, 1, size - 1))
    collected = shift(dkv)
    dq, share, _ = visit(step_of(steps, size - 1), kv, dq, False)
    return dq, shift(accumulate(collected, share)), columns
