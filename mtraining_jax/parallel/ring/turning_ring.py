"""How keys, values and their gradients turn over a mesh axis.

Communication is arranged so that XLA can hide it. What travels to the next step is sent at the
*top* of a step, as it came, before the kernel that uses it: no transfer waits for a kernel of
its own step. In the backward pass dk and dv follow with a lag of one step for the same reason:
the sums that a step sends are those of the step before, and the kernel's share is added to what
arrives.

XLA keeps one collective under way at a time on GPUs unless it is told otherwise
(`ring_compiler_options`). In a hierarchical ring a transfer between nodes would then hide behind
one kernel only; told, it stays under way during the whole turn inside the node (read off the
schedule that jax 0.11.2 compiles for 8 H200).
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.parallel.ordering import after
from mtraining_jax.parallel.ring.rank_kernels import Pair, Steps, join, plus
from mtraining_jax.parallel.ring.topology import RingTopology


def ring_forward(plan: RingTopology, steps: Steps, kv: Pair) -> list[tuple[Array, Array]]:
    """Output and lse of every query segment, by turning keys and values.

    Args:
        plan: not one that gathers.
        steps: of the forward pass.
        kv: keys and values of this rank.
    """
    kv = _columns_first(plan, steps, kv)

    def attend(outer: Array, inner: Array, kv: Pair, state: list, last: bool) -> list:
        calls = steps.calls_on(plan.source(steps.rank, outer, inner), kv, with_columns=last)
        return steps.forward(calls, state, last)

    def inner_turn(outer: Array, kv: Pair, state: list, last: bool) -> list:
        return _turn(
            plan.inner_size, plan.shift_inner, kv, state,
            lambda inner, kv, state, end: attend(outer, inner, kv, state, last and end),
        )

    state = [None] * len(steps.queries)
    if plan.layout.num_ranks > 1:  # loops carry arrays
        state = [_nothing_yet(x) for x in steps.queries]
    return _turn(plan.outer_size, plan.shift_outer, kv, state, inner_turn)


def ring_backward(plan: RingTopology, steps: Steps, kv: Pair, rows: tuple[Array, Array, Array]):
    """Gradients by turning keys and values, and gradients with them.

    Args:
        plan, steps, kv: as in `ring_forward`, of the backward pass.
        rows: as in `Steps.backward`.

    Returns:
        dq of every query segment; (dk, dv) of this rank's keys and values; all fp32.
    """
    kv = _columns_first(plan, steps, kv)

    def differentiate(outer: Array, inner: Array, kv: Pair, dq: list, first: bool):
        calls = steps.calls_on(plan.source(steps.rank, outer, inner), kv, with_columns=first)
        dq, dkv, columns = steps.backward(calls, rows, dq)
        return dq, join(dkv), columns

    def inner_turn(outer: Array, kv: Pair, dq: list, first: bool):
        return _turn_back(
            plan.inner_size, plan.shift_inner, kv, dq,
            lambda inner, kv, dq, begin: differentiate(outer, inner, kv, dq, first and begin),
        )

    dq = [None] * len(steps.queries)
    dq, dkv, columns = _turn_back(plan.outer_size, plan.shift_outer, kv, dq, inner_turn)
    if columns is not None:
        columns = after(columns, dkv[0])
    return dq, steps.return_columns(dkv, columns)


def _columns_first(plan: RingTopology, steps: Steps, kv: Pair) -> Pair:
    """Fetches the columns, and keeps the ring from starting before where that matters."""
    steps.fetch_columns(kv, jnp.asarray(steps.rank)[None], plan.axis_names)
    return after(kv, steps.column_kv[0]) if steps.columns else kv


def _nothing_yet(q: Array) -> tuple[Array, Array]:
    """The running output and lse of queries before the first step."""
    lse = jnp.full((q.shape[0], q.shape[2], q.shape[1]), -jnp.inf, jnp.float32)
    return jnp.zeros(q.shape, jnp.float32), lse


def _turn(size: int, shift: Callable, kv: Pair, state: list, visit: Callable) -> list:
    """One turn of keys and values over an axis: `size` visits, size - 1 hops.

    Args:
        size: ranks on the axis.
        shift: sends a tree of arrays one rank on.
        kv: keys and values of this rank.
        state: what visits update.
        visit: (step, kv, state, whether it is the last) -> state.
    """

    def body(carry, step):
        kv, state = carry
        arriving = shift(kv)
        return (arriving, visit(step, kv, state, False)), None

    if size > 1:
        (kv, state), _ = lax.scan(body, (kv, state), jnp.arange(size - 1, dtype=jnp.int32))
    return visit(size - 1, kv, state, True)


def _turn_back(size: int, shift: Callable, kv: Pair, dq: list, visit: Callable):
    """One turn of keys, values and the gradients that they collect.

    Args:
        size, shift, kv: as in `_turn`.
        dq: gradients of the queries, which visits add to.
        visit: (step, kv, dq, whether it is the first) -> dq, this rank's share of (dk, dv) of
            the visiting keys and values, and gradients of columns or None.

    Returns:
        dq; (dk, dv) of this rank's own keys and values; gradients of columns or None.
    """
    if size == 1:
        return visit(0, kv, dq, True)
    arriving = shift(kv)
    dq, dkv, columns = visit(0, kv, dq, True)

    def body(carry, step):
        kv, dkv, dq = carry
        arriving, collected = shift((kv, dkv))
        dq, share, _ = visit(step, kv, dq, False)
        return (arriving, plus(collected, share), dq), None

    middle = jnp.arange(1, size - 1, dtype=jnp.int32)
    kv, dkv, dq = arriving, dkv, dq
    if middle.size:
        (kv, dkv, dq), _ = lax.scan(body, (kv, dkv, dq), middle)
    collected = shift(dkv)
    dq, share, _ = visit(size - 1, kv, dq, False)
    return dq, shift(plus(collected, share)), columns
