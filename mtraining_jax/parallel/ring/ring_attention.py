"""Ring attention: queries stay on their rank while keys and values travel.

Transfers of the next step start at the *beginning* of a step, before the kernel that hides them.
For the same reason dk and dv follow one step later in the backward pass: a step sends the sums of
the previous step, and the kernel's contribution is added to what arrives. In the striped layout,
the first gather overlaps with the work on the rank's own shard.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.ring.steps import RankKernels, RingPlans, State, StepPlans, plan_ring
from mtraining_jax.parallel.ring.topology import RingAxis, RingTopology
from mtraining_jax.parallel.ring.transfers import GradsInFlight, KeysInFlight, Transfers
from mtraining_jax.parallel.ring.windows import RingWindow
from mtraining_jax.selection import collectives
from pallas_kernels.checks import Shaped
from pallas_kernels.chunks import PastChunks
from pallas_kernels.head_loop import HeadLoop, num_head_chunks
from pallas_kernels.index import Index, TiledIndex, TokenChunksIndex, WindowIndex
from pallas_kernels.interface import Pair
from pallas_kernels.one_device import OneDevice, schedule_of
from pallas_kernels.ops import scale_of
from pallas_kernels.schedule import Schedule, Triple, attend


def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    index: TiledIndex,
    *,
    layout: Layout,
    axis_names: tuple[str, ...] = ("node", "device"),
    ring: str = "gather",
    scale: float | None = None,
    backend: str | None = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Computes causal attention of a sequence sharded over mesh axes; differentiable.

    Call it inside `jax.shard_map(..., check_vma=False)`. Source: Ring Attention (arXiv 2310.01889).

    Args:
        q: [B, n, Hq, D], this rank's queries in layout order, n = S/W.
        k, v: [B, n, Hk, D], Hq a multiple of Hk.
        index: pairs to compute, any causal index in global positions. Replicated, or if
            `sharded_by_query`, the rows of this rank's blocks in layout order. Not differentiated.
        layout: distribution of the S tokens over the W ranks.
        axis_names: mesh axes of the sequence, slowest first; () on one device.
        ring: one of `RINGS`.
        scale, backend: as in `sparse_attention`.
        return_lse: whether to also return the log-sum-exp of the logits.

    Returns:
        out [B, n, Hq, D] in the dtype of q; outputs and gradients are accumulated in fp32. With
        `return_lse`, a pair of out and lse, fp32 [B, Hq, n], -inf for empty rows.

    Raises:
        ValueError: if `ring` is unknown, or shapes, layout and axes do not match.
    """
    out, lse = attend(
        ring_schedule(q, k, v, index, layout, axis_names, ring, scale, backend), q, k, v, index
    )
    return (out, lse) if return_lse else out


def ring_schedule(
    q: Array,
    k: Array,
    v: Array,
    index: Any,
    layout: Layout,
    axis_names: tuple[str, ...],
    ring: str,
    scale: float | None,
    backend: str | None,
) -> Schedule:
    """How `ring_attention` is carried out: all heads at once, or in parts."""
    axis_sizes = tuple(lax.axis_size(name) for name in axis_names)
    topology = RingTopology(layout, axis_names, axis_sizes, ring, scale, backend)
    _check(topology, q, k, v, index)
    parts = num_head_chunks(q.shape[2], k.shape[2], *_sizes(topology, index, k))
    return HeadLoop(Ring(topology), parts) if parts > 1 else Ring(topology)


def _sizes(topology: RingTopology, index: Index, k: Array) -> tuple[int, int]:
    """Returns the last arguments of `num_head_chunks`."""
    layout, (batch, tokens) = topology.layout, k.shape[:2]
    gathered = tokens * topology.group_size if topology.gathered else 2 * tokens
    # Keys and values, and their gradients in fp32.
    gathered *= 2 * batch * k.shape[2] * k.shape[3] * (k.dtype.itemsize + 4)
    pairs = batch * layout.local_blocks * layout.num_blocks if index.sharded_by_query else 0
    return gathered, pairs


def _check(topology: RingTopology, q: Array, k: Array, v: Array, index: Index) -> None:
    """Raises ValueError for mismatched arrays or index."""
    if not isinstance(index, TiledIndex):
        raise ValueError(
            f"a {type(index).__name__} cannot be expressed as tiles; use sparse_attention"
        )
    layout = topology.layout
    local_tokens = layout.local_blocks * layout.block_size
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or x.shape[1] != local_tokens:
            raise ValueError(
                f"{name} has shape {x.shape}; expected [batch, {local_tokens}, heads, dim], for "
                f"seq_len={layout.seq_len} over {layout.num_ranks} ranks"
            )
    if index.block_size != layout.block_size:
        raise ValueError(
            f"the index has block_size={index.block_size} but the layout has {layout.block_size}"
        )
    if not index.causal:
        raise ValueError("ring attention is causal, but the index is not")


@dataclasses.dataclass(frozen=True)
class Ring:
    """Keys and values pass all ranks; work lists of all steps are made before the first one."""

    topology: RingTopology

    @property
    def backend(self) -> str | None:
        return self.topology.backend

    def prepare(self, q: Shaped, k: Shaped, index: TiledIndex) -> RingPlans:
        return plan_ring(self.topology, index, q, k)

    @jax.named_scope("ring_forward")
    def forward(self, q: Array, k: Array, v: Array, work: RingPlans) -> Pair:
        outs, lses = zip(*_ring_forward(self.topology, work, q, (k, v)), strict=True)
        return jnp.concatenate(outs, axis=1), jnp.concatenate(lses, axis=2)

    @jax.named_scope("ring_backward")
    def backward(
        self, q: Array, k: Array, v: Array, dout: Array, work: RingPlans, lse: Array, delta: Array
    ) -> Triple:
        dq, (dk, dv) = _ring_backward(self.topology, work, q, (k, v), (dout, lse, delta))
        dq = jnp.concatenate(dq, axis=1)
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _ring_forward(topology: RingTopology, plans: RingPlans, q: Array, kv: Pair) -> list[Pair]:
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


def _ring_backward(
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


def schedule_over(
    axes: tuple[str, ...],
    layout: Layout | None,
    ring: str,
    q: Array,
    k: Array,
    v: Array,
    index: Index,
    scale: float | None,
    backend: str | None,
) -> Schedule:
    """The schedule of a rank, for arrays and an index as in `ring_attention`.

    `axes` are those that shard the sequence, () for one device.
    """
    if not axes or layout is None:
        return schedule_of(q, k, index, scale, backend)
    scale = scale_of(scale, q)
    if isinstance(index, WindowIndex):
        return RingWindow(layout, axes, index.last, OneDevice(scale, backend))
    blocks = None
    if isinstance(index, TokenChunksIndex):
        blocks = RankBlocks(layout, axes)
        index = index.own(blocks.rows(layout.local_blocks))
    inner = ring_schedule(q, k, v, index, layout, axes, ring, scale, backend)
    return inner if blocks is None else PastChunks(inner, scale, blocks)


@dataclasses.dataclass(frozen=True)
class RankBlocks:
    """The blocks of a rank; keys and values of all ranks are gathered, across nodes too."""

    layout: Layout
    axes: tuple[str, ...]

    def rows(self, count: int) -> Array:
        return self.layout.block_ids(lax.axis_index(self.axes))

    def all(self, x_BnHD: Array) -> Array:
        layout = self.layout
        rows = self.rows(layout.local_blocks)
        return collectives.all_blocks(x_BnHD, rows, layout.num_blocks, self.axes)

    def local(self, x_BSHD: Array) -> Array:
        batch, tokens, *heads = x_BSHD.shape
        shape = batch, tokens // self.layout.num_ranks, *heads
        local = jax.ShapeDtypeStruct(shape, jnp.float32)
        return jax.linear_transpose(self.all, local)(x_BSHD.astype(jnp.float32))[0]
