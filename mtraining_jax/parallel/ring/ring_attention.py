"""Ring attention: every rank keeps its queries while keys and values travel.

Which way they travel is the plan's: `turning_ring` has the turns of keys and values over mesh axes,
`gather_ring` the gathering of a node's.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.ring.gather_ring import gather_backward, gather_forward
from mtraining_jax.parallel.ring.rank_kernels import Steps
from mtraining_jax.parallel.ring.topology import RingTopology
from mtraining_jax.parallel.ring.turning_ring import ring_backward, ring_forward
from pallas_kernels.index import DenseIndex, VerticalSlashIndex
from pallas_kernels.ops import delta_of

# Names under which a remat policy can keep what the backward pass needs.
SAVED_NAMES = ("attn_out", "attn_lse", "sparse_index")


def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    index: VerticalSlashIndex | DenseIndex | None,
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
        index: what to compute, in global positions, the same on every rank; None is a causal
            `DenseIndex`. No gradient flows to it.
        layout: how the S tokens are dealt to the W ranks.
        axis_names: mesh axes of the sequence, slowest first; () on one device.
        axis_sizes: their sizes; default: those of the mesh.
        ring: how keys and values travel, the same result each way. "hierarchical": with two axes,
            over the second inside each step of the first. "flat": over both as one. "gather":
            as "hierarchical" over the first of two axes; over the second, or the only one, every
            device gathers the keys and values of all.
        scale: of the logits; default 1/sqrt(D).
        backend: of the kernels; None for the best that runs here.
        return_lse: whether to give the log of the softmax's denominator as well.

    Returns:
        [B, n, Hq, D] in the dtype of q. Accumulated in fp32; gradients as well. With
        `return_lse`, a pair of it and fp32 [B, Hq, n], natural logarithm, -inf for empty rows;
        gradients flow through both.

    Raises:
        UserError: if `ring` is unknown.
        ValueError: if shapes, layout and axes do not fit one another.
    """
    if axis_sizes is None:
        axis_sizes = tuple(lax.axis_size(name) for name in axis_names)
    plan = RingTopology(layout, tuple(axis_names), tuple(axis_sizes), ring, scale, backend)
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
    if isinstance(index, DenseIndex):
        if not index.causal:
            raise ValueError("a ring computes causal attention, but the index is not causal")
        index = None
    result = _ring(plan, q, k, v, index)
    return result if return_lse else result[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(plan, q, k, v, index):
    return _ring_fwd(plan, q, k, v, index)[0]


def _ring_fwd(plan, q, k, v, index):
    run = gather_forward if plan.gathers else ring_forward
    state = run(plan, Steps(plan, q, index), (k, v))
    outs, lses = zip(*state, strict=True)
    out, lse = jnp.concatenate(outs, axis=1), jnp.concatenate(lses, axis=2)
    out, lse = checkpoint_name(out, "attn_out"), checkpoint_name(lse, "attn_lse")
    return (out, lse), (q, k, v, index, out, lse)


def _ring_bwd(plan, residuals, cotangents):
    dout, dlse = cotangents
    q, k, v, index, out, lse = residuals
    # d lse / d logits are the softmax weights, so its cotangent joins delta in every kernel.
    rows = dout, lse, delta_of(out, dout, backend=plan.backend) - dlse
    run = gather_backward if plan.gathers else ring_backward
    dq, (dk, dv) = run(plan, Steps(plan, q, index), (k, v), rows)
    dq = jnp.concatenate(dq, axis=1)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_ring.defvjp(_ring_fwd, _ring_bwd)
