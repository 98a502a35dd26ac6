"""Ring attention: every rank keeps its queries while keys and values travel.

Communication is arranged so that XLA can hide it. What travels to the next step is sent at the
*top* of a step, as it came, before the kernel that uses it: no transfer waits for a kernel of
its own step. In the backward pass dk and dv follow with a lag of one step for the same reason:
the sums that a step sends are those of the step before, and the kernel's share is added to what
arrives.

XLA keeps one collective under way at a time on GPUs unless it is told otherwise. In a hierarchical
ring a transfer between nodes then hides behind one kernel only; with the compiler option
xla_gpu_experimental_parallel_collective_overlap_limit=4 it stays under way during the whole turn
inside the node (read off the schedule that jax 0.11.2 compiles for 8 H200).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.ordering import after
from mtraining_jax.parallel.ring_schedule import RingPlan, StepTiles, segment_pairs
from mtraining_jax.parallel.verticals import (
    gather_verticals,
    has_verticals,
    return_vertical_gradients,
)
from pallas_kernels import attention as kernels
from pallas_kernels.index import VerticalSlashIndex
from pallas_kernels.tiles import VerticalColumns, vertical_columns

# Names under which a remat policy can keep what the backward pass needs.
SAVED_NAMES = ("attn_out", "attn_lse", "sparse_index")


def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    index: VerticalSlashIndex | None,
    *,
    layout: Layout,
    axis_names: tuple[str, ...] = ("node", "device"),
    axis_sizes: tuple[int, ...] | None = None,
    hierarchical: bool = True,
    scale: float | None = None,
    backend: str | None = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Causal attention of a sequence that is sharded over mesh axes; differentiable.

    Call it inside `jax.shard_map(..., check_vma=False)`. Residuals of the backward pass carry
    the names `attn_out` and `attn_lse` (`jax.ad_checkpoint.checkpoint_name`).

    Args:
        q: [B, n, Hq, D], this rank's queries in layout order, n = S/W.
        k, v: [B, n, Hk, D], Hq a multiple of Hk.
        index: what to compute, in global positions, the same on every rank; None for all causal
            pairs. No gradient flows to it.
        layout: how the S tokens are dealt to the W ranks.
        axis_names: mesh axes of the sequence, slowest first; () on one device.
        axis_sizes: their sizes; default: those of the mesh.
        hierarchical: with two axes, turn over the second inside each step of the first.
        scale: of the logits; default 1/sqrt(D).
        backend: of the kernels; None for the best that runs here.
        return_lse: whether to give the log of the softmax's denominator as well.

    Returns:
        [B, n, Hq, D] in the dtype of q. Accumulated in fp32; gradients as well. With
        `return_lse`, a pair of it and fp32 [B, Hq, n], natural logarithm, -inf for empty rows;
        gradients flow through both.

    Raises:
        ValueError: if shapes, layout and axes do not fit one another.
    """
    if axis_sizes is None:
        axis_sizes = tuple(lax.axis_size(name) for name in axis_names)
    plan = RingPlan(layout, tuple(axis_names), tuple(axis_sizes), hierarchical, scale, backend)
    local_tokens = layout.seq_len // layout.num_ranks
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or x.shape[1] != local_tokens:
            raise ValueError(
                f"{name} has shape {x.shape}: [batch, {local_tokens}, heads, dim] is needed, as "
                f"seq_len={layout.seq_len} over {layout.num_ranks} ranks"
            )
    if index is not None and index.block_size != layout.block_size:
        raise ValueError(
            f"the index has block_size={index.block_size} but the layout {layout.block_size}"
        )
    result = _ring(plan, q, k, v, index)
    return result if return_lse else result[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(plan, q, k, v, index):
    return _ring_fwd(plan, q, k, v, index)[0]


def _ring_fwd(plan, q, k, v, index):
    step = _Step(plan, q, k, v, index)

    def attend(outer: Array, inner: Array, kv: _Pair, state: list, last: bool) -> list:
        return step.forward(plan.source(step.rank, outer, inner), kv, state, with_columns=last)

    def inner_turn(outer: Array, kv: _Pair, state: list, last: bool) -> list:
        return _turn(
            plan.inner_size, plan.shift_inner, kv, state,
            lambda inner, kv, state, end: attend(outer, inner, kv, state, last and end),
        )

    kv = step.once_columns_are_here((k, v))
    state = _turn(plan.outer_size, plan.shift_outer, kv, step.nothing_yet(), inner_turn)
    out = jnp.concatenate([out for out, _ in state], axis=1).astype(q.dtype)
    lse = jnp.concatenate([lse for _, lse in state], axis=2)
    out, lse = checkpoint_name(out, "attn_out"), checkpoint_name(lse, "attn_lse")
    return (out, lse), (q, k, v, index, out, lse)


def _ring_bwd(plan, residuals, cotangents):
    dout, dlse = cotangents
    q, k, v, index, out, lse = residuals
    step = _Step(plan, q, k, v, index)
    # d lse / d logits are the softmax weights, so its cotangent joins delta in every kernel.
    rows = dout, lse, kernels.delta_of(out, dout) - dlse

    def differentiate(outer: Array, inner: Array, kv: _Pair, dq: list, first: bool):
        source = plan.source(step.rank, outer, inner)
        return step.backward(source, kv, rows, dq, with_columns=first)

    def inner_turn(outer: Array, kv: _Pair, dq: list, first: bool):
        return _turn_back(
            plan.inner_size, plan.shift_inner, kv, dq,
            lambda inner, kv, dq, begin: differentiate(outer, inner, kv, dq, first and begin),
        )

    dq = [jnp.zeros(x.shape, jnp.float32) for x in step.queries]
    kv = step.once_columns_are_here((k, v))
    dq, (dk, dv), columns = _turn_back(plan.outer_size, plan.shift_outer, kv, dq, inner_turn)
    if columns is not None:
        columns = after(columns, dk)
        dk, dv = return_vertical_gradients(
            dk, dv, *columns, index, plan.layout, step.rank, plan.axis_names
        )
    dq = jnp.concatenate(dq, axis=1)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_ring.defvjp(_ring_fwd, _ring_bwd)

_Pair = tuple[Array, Array]


def _turn(size: int, shift: Callable, kv: _Pair, state: list, visit: Callable) -> list:
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


def _turn_back(size: int, shift: Callable, kv: _Pair, dq: list, visit: Callable):
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
        return (arriving, _add(collected, share), dq), None

    middle = jnp.arange(1, size - 1, dtype=jnp.int32)
    kv, dkv, dq = arriving, dkv, dq
    if middle.size:
        (kv, dkv, dq), _ = lax.scan(body, (kv, dkv, dq), middle)
    collected = shift(dkv)
    dq, share, _ = visit(size - 1, kv, dq, False)
    return dq, shift(_add(collected, share)), columns


def _add(a: _Pair, b: _Pair) -> _Pair:
    return jax.tree.map(jnp.add, a, b)


class _Step:
    """The kernel calls of one step on one rank; built once per layer and pass."""

    def __init__(self, plan: RingPlan, q: Array, k: Array, v: Array, index):
        self.plan = plan
        self.rank = plan.rank()
        layout = plan.layout
        self.segments = layout.segments(self.rank)
        self.queries = self._split(q)
        self.tiles = StepTiles(layout, index, q.shape[0], q.shape[2])
        self.columns: list[VerticalColumns] | None = None
        if has_verticals(index):
            gathered = gather_verticals(k, v, index, layout, self.rank, plan.axis_names)
            self.columns = [
                vertical_columns(
                    index, *gathered,
                    segment.first_block + segment.stride * jnp.arange(segment.num_blocks),
                    layout.num_blocks,
                )
                for segment in self.segments
            ]

    def once_columns_are_here(self, kv: _Pair) -> _Pair:
        """Keeps the ring from starting before the columns were gathered, where that matters."""
        return after(kv, self.columns[0].k) if self.columns else kv

    def nothing_yet(self) -> list[tuple[Array, Array]]:
        """The running output and lse of each query segment before the first step."""
        return [
            (
                jnp.zeros(x.shape, jnp.float32),
                jnp.full((x.shape[0], x.shape[2], x.shape[1]), -jnp.inf, jnp.float32),
            )
            for x in self.queries
        ]

    def forward(self, source: Array, kv: _Pair, state: list, with_columns: bool) -> list:
        """Merges this rank's attention to the shard of `source` into the running state."""
        state = list(state)
        for i, _, tiles, columns, key, value in self._calls(source, kv, with_columns):
            state[i] = kernels.forward(
                self.queries[i], key, value, tiles, columns,
                init=state[i], scale=self.plan.scale, backend=self.plan.backend,
            )
        return state

    def backward(self, source: Array, kv: _Pair, rows, dq: list, with_columns: bool):
        """Adds to dq; gives (dk, dv) of the shard of `source`, and gradients of columns."""
        dq = list(dq)
        dout, lse, delta = (self._split(rows[0]), *(self._split(x, 2) for x in rows[1:]))
        dkv: list[_Pair | None] = [None] * len(self.segments)
        total = None
        for i, j, tiles, columns, key, value in self._calls(source, kv, with_columns):
            grads = kernels.backward(
                self.queries[i], key, value, dout[i], lse[i], delta[i], tiles, columns,
                scale=self.plan.scale, backend=self.plan.backend,
            )
            dq[i] = dq[i] + grads.dq
            share = grads.dk, grads.dv
            dkv[j] = share if dkv[j] is None else _add(dkv[j], share)
            if columns is not None:
                share = grads.dk_columns, grads.dv_columns
                total = share if total is None else _add(total, share)
        dk, dv = (jnp.concatenate(parts, axis=1) for parts in zip(*dkv, strict=True))
        return dq, (dk, dv), total

    def _calls(self, source: Array, kv: _Pair, with_columns: bool):
        """One kernel call per pair of segments; columns go with the first of a query segment."""
        keys, values = (self._split(x) for x in kv)
        sources = self.plan.layout.segments(source)
        for i, j in segment_pairs(self.plan.layout):
            tiles = self.tiles.pair(self.segments[i], sources[j])
            columns = self.columns[i] if with_columns and self.columns and j == 0 else None
            yield i, j, tiles, columns, keys[j], values[j]

    def _split(self, x: Array, axis: int = 1) -> list[Array]:
        """The parts of x along its token axis that belong to the segments."""
        return jnp.split(x, len(self.segments), axis=axis)
