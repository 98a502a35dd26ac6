"""Ring attention: queries stay on their rank while keys and values travel."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.ring.schedule import ring_backward, ring_forward
from mtraining_jax.parallel.ring.steps import RingPlans, plan_ring
from mtraining_jax.parallel.ring.topology import RingTopology
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
        outs, lses = zip(*ring_forward(self.topology, work, q, (k, v)), strict=True)
        return jnp.concatenate(outs, axis=1), jnp.concatenate(lses, axis=2)

    @jax.named_scope("ring_backward")
    def backward(
        self, q: Array, k: Array, v: Array, dout: Array, work: RingPlans, lse: Array, delta: Array
    ) -> Triple:
        dq, (dk, dv) = ring_backward(self.topology, work, q, (k, v), (dout, lse, delta))
        dq = jnp.concatenate(dq, axis=1)
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


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
