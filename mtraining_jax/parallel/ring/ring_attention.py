"""Ring attention: every rank keeps its queries while keys and values travel.

The topology says which way they travel: `turning_ring` passes keys and values round one or two mesh
axes, `gather_ring` gathers those of a node. What the kernels walk at all steps is planned before
the first one, for both passes.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from mtraining_jax.errors import UserError
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.ring.gather_ring import (
    GatherPlans,
    gather_backward,
    gather_forward,
    plan_gathering,
)
from mtraining_jax.parallel.ring.topology import RingTopology
from mtraining_jax.parallel.ring.turning_ring import (
    TurningPlans,
    plan_turning,
    turning_backward,
    turning_forward,
)
from pallas_kernels import names
from pallas_kernels.index import Index
from pallas_kernels.one_device import attention
from pallas_kernels.ops import delta_of


def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    index: Index,
    *,
    layout: Layout,
    axis_names: tuple[str, ...] = ("node", "device"),
    axis_sizes: tuple[int, ...] | None = None,
    ring: str = "gather",
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
        index: what to compute, of any causal kind, in global positions. The same on every rank,
            or if it is `by_rows`, the rows of this rank's blocks in layout order. One that lists
            blocks needs a ring that gathers. No gradient flows to it.
        layout: how the S tokens are dealt to the W ranks.
        axis_names: mesh axes of the sequence, slowest first; () on one device.
        axis_sizes: their sizes; default: those of the mesh.
        ring: how keys and values travel, with the same result. "gather": over the second of two
            axes, or the only one, every device gathers the keys and values of all; over the first
            they pass round in a ring. "hierarchical": a ring over the second axis inside each step
            of the ring over the first. "flat": one ring over both axes.
        scale: of the logits; default 1/sqrt(D).
        backend: of the kernels; None for the best that runs here.
        return_lse: whether to give the log of the softmax's denominator as well.

    Returns:
        [B, n, Hq, D] in the dtype of q. Accumulated in fp32; gradients as well. With
        `return_lse`, a pair of it and fp32 [B, Hq, n], natural logarithm, -inf for empty rows;
        gradients flow through both.

    Raises:
        UserError: if `ring` is unknown, or cannot show keys as the index needs them.
        ValueError: if shapes, layout and axes do not match.
    """
    if axis_sizes is None:
        axis_sizes = tuple(lax.axis_size(name) for name in axis_names)
    topology = RingTopology(layout, tuple(axis_names), tuple(axis_sizes), ring, scale, backend)
    _check(topology, q, k, v, index)
    if layout.num_ranks == 1:
        return attention(
            q, k, v, index, scale=scale, backend=backend, return_lse=return_lse
        )
    result = _ring(topology, q, k, v, ring_plans(topology, index, q, k))
    return result if return_lse else result[0]


def ring_plans(
    topology: RingTopology, index: Index, q: Array, k: Array
) -> GatherPlans | TurningPlans:
    """What the kernels of this rank walk at all steps of both passes.

    Args:
        topology: of a ring of any number of ranks.
        index: as in `ring_attention`.
        q: [B, n, Hq, D], this rank's queries; only shape and dtype are read.
        k: [B, n, Hk, D], this rank's keys; likewise.
    """
    plan = plan_gathering if topology.gathers else plan_turning
    return plan(topology, index, q, k)


def _check(topology: RingTopology, q: Array, k: Array, v: Array, index: Index) -> None:
    """Raises ValueError (UserError where another ring would do) unless arrays and index suit."""
    layout = topology.layout
    local_tokens = layout.seq_len // layout.num_ranks
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or x.shape[1] != local_tokens:
            raise ValueError(
                f"{name} has shape {x.shape}: [batch, {local_tokens}, heads, dim] is needed, as "
                f"seq_len={layout.seq_len} over {layout.num_ranks} ranks"
            )
    if index.block_size != layout.block_size:
        raise ValueError(
            f"the index has block_size={index.block_size} but the layout {layout.block_size}"
        )
    if not index.causal:
        raise ValueError("a ring computes causal attention, but the index is not causal")
    turns = layout.num_ranks > 1 and not topology.gathers
    if turns and not index.key_shards_apart:
        raise UserError(
            f"ring={topology.ring!r} shows the keys of one rank after another, which a "
            f"{type(index).__name__} cannot be cut into: use ring='gather', over at least two "
            "devices of a node"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(topology, q, k, v, plans):
    return _ring_fwd(topology, q, k, v, plans)[0]


def _ring_fwd(topology, q, k, v, plans):
    run = gather_forward if topology.gathers else turning_forward
    outs, lses = zip(*run(topology, plans, q, (k, v)), strict=True)
    out, lse = jnp.concatenate(outs, axis=1), jnp.concatenate(lses, axis=2)
    out, lse = checkpoint_name(out, names.OUTPUT), checkpoint_name(lse, names.LSE)
    return (out, lse), (q, k, v, plans, out, lse)


def _ring_bwd(topology, residuals, cotangents):
    dout, dlse = cotangents
    q, k, v, plans, out, lse = residuals
    # d lse / d logits are the softmax weights, so its cotangent joins delta in every kernel.
    rows = dout, lse, delta_of(out, dout, backend=topology.backend) - dlse
    run = gather_backward if topology.gathers else turning_backward
    dq, (dk, dv) = run(topology, plans, q, (k, v), rows)
    dq = jnp.concatenate(dq, axis=1)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_ring.defvjp(_ring_fwd, _ring_bwd)
