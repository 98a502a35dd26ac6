"""Order of transfers and kernels in a ring: queries stay while keys and values travel.

Transfers of the next step start at the *beginning* of a step, before the kernel that hides them.
For the same reason dk and dv follow one step later in the backward pass: a step sends the sums of
the previous step, and the kernel's contribution is added to what arrives. In the striped layout,
the first gather overlaps with the work on the rank's own shard.
"""

from collections.abc import Sequence
from typing import Any

from jax import Array, lax

from mtraining_jax.parallel.ring.steps import Pair, RankKernels, RingPlans, State, StepPlans
from mtraining_jax.parallel.ring.topology import RingAxis, RingTopology
from mtraining_jax.parallel.ring.transfers import GradsInFlight, KeysInFlight, Transfers


def ring_forward(topology: RingTopology, plans: RingPlans, q: Array, kv: Pair) -> list[Pair]:
    """Computes (output, lse) of every query segment from this rank's queries, keys and values."""
    transfers, kernels = Transfers(topology), RankKernels(topology, q)
    held = transfers.hold(kv)
    state, source = [None] * kernels.num_segments, held[-1]
    if plans.own is not None:
        state = kernels.forward(plans.own, [kv], None, state, last=False)
        # Columns are not needed before the last step. Without the barrier, their sum over nodes
        # would make the first kernel wait for the gather.
        source = lax.optimization_barrier((source, state))[0] if topology.rotating else source
    columns, held = transfers.columns_first(plans.column_positions, held, source)

    def attend(step: StepPlans, held: KeysInFlight, state: State, last: bool) -> list[Pair]:
        if last and plans.last_with_columns is not None:
            step = plans.last_with_columns
        return kernels.forward(step, transfers.key_segments(held[-1]), columns, state, last)

    def turn(
        axes: Sequence[RingAxis], steps: Any, held: KeysInFlight, state: State, last: bool
    ) -> list[Pair]:
        """Visits all shards along some axes; `last` if no other step follows."""
        if not axes:
            return attend(steps, held, state, last)
        axis, *inner = axes

        def visit(
            carry: tuple[KeysInFlight, State], step: Any
        ) -> tuple[tuple[KeysInFlight, State], None]:
            held, state = carry
            arriving = transfers.advance(axis, held)
            state = turn(inner, step, held, state, False)
            if inner:
                # Else XLA would combine hops of the next turn, which wait for what arrives, with
                # those of this one.
                arriving, state = lax.optimization_barrier((arriving, state))
            return (arriving, state), None

        carry, _ = visit((held, state), steps.first)
        if axis.size > 2:
            carry, _ = lax.scan(visit, carry, steps.middle())
        return turn(inner, steps.last(), *carry, last)

    return turn(topology.rotating, plans.steps, held, state, True)


def ring_backward(
    topology: RingTopology, plans: RingPlans, q: Array, kv: Pair, rows: tuple[Array, Array, Array]
) -> tuple[list[Array], Pair]:
    """Computes fp32 dq of every query segment and (dk, dv), which travel with the keys."""
    transfers, kernels = Transfers(topology), RankKernels(topology, q)
    held = transfers.hold(kv)
    dq, collected = [None] * kernels.num_segments, None
    if plans.own is not None:
        dq, own, _ = kernels.backward(plans.own, [kv], None, rows, dq)
        # The barrier puts dk and dv of the rank's own keys first, so that the gather overlaps
        # with them. XLA would choose the opposite order.
        here, collected = lax.optimization_barrier((held[-1], transfers.restore(own)))
        held = kv, here
    columns, held = transfers.columns_first(plans.column_positions, held, held[-1])

    def differentiate(step: StepPlans, held: KeysInFlight, dq: Sequence, first: bool):
        """Returns dq, (dk, dv) of the visited group, and column gradients to add to the shard."""
        if first and plans.first_with_columns is not None:
            step = plans.first_with_columns
        keys = transfers.key_segments(held[-1])
        dq, parts, dcolumns = kernels.backward(step, keys, columns, rows, dq)
        shares = transfers.restore(parts)
        if dcolumns is not None and topology.gathered:  # before the group's gradients are scattered
            shares = transfers.add_columns(shares, dcolumns, plans.column_positions)
            dcolumns = None
        return dq, shares, dcolumns

    def turn(
        axes: Sequence[RingAxis],
        steps: Any,
        held: KeysInFlight,
        dq: Sequence,
        first: bool,
        collected: Pair | None = None,
    ):
        """Visits all shards along some axes, and returns their gradients to where they started."""
        if not axes:
            return differentiate(steps, held, dq, first)
        axis, *inner = axes
        arriving = transfers.advance(axis, held)
        dq, shares, dcolumns = turn(inner, steps.first, held, dq, first)
        pending = transfers.defer(collected, shares)

        def visit(carry: tuple[KeysInFlight, GradsInFlight, Sequence], step: Any):
            held, pending, dq = carry
            # Send the gradients of the previous step home, together with their keys and values.
            collected = axis.shift(transfers.settle(pending))
            arriving = transfers.advance(axis, held)
            dq, shares, _ = turn(inner, step, held, dq, False)
            return (arriving, transfers.defer(collected, shares), dq), None

        carry = arriving, pending, dq
        if axis.size > 2:
            carry, _ = lax.scan(visit, carry, steps.middle())
        held, pending, dq = carry
        collected = axis.shift(transfers.settle(pending))
        dq, shares, _ = turn(inner, steps.last(), held, dq, False)
        return dq, axis.shift(transfers.settle(transfers.defer(collected, shares))), dcolumns

    dq, dkv, dcolumns = turn(topology.rotating, plans.steps, held, dq, True, collected)
    if not topology.rotating:
        dkv = transfers.settle((collected, dkv))
    if dcolumns is not None:
        dkv = transfers.add_columns(dkv, dcolumns, plans.column_positions)
    return dq, dkv
