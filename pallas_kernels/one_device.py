"""Differentiable sparse attention over arrays of one device."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import backends, names
from pallas_kernels.composed import chunk_attention
from pallas_kernels.head_loop import attention_in_parts, head_parts
from pallas_kernels.index import Index, TiledIndex, TokenChunksIndex, WindowIndex
from pallas_kernels.ops import Pair, backward, forward, plan, scale_of
from pallas_kernels.plans import Plan
from pallas_kernels.tiles import gather_columns

_Computed = TiledIndex | TokenChunksIndex | WindowIndex


@jax.numpy_rank_promotion("allow")
def attention(
    q: Array,
    k: Array,
    v: Array,
    index: Index,
    *,
    scale: float | None = None,
    backend: str | None = None,
    return_lse: bool = False,
) -> Array | Pair:
    """Computes attention over the pairs of an index, on one device; differentiable.

    Args:
        q: [B, Sq, Hq, D]; Sq a multiple of `index.block_size`.
        k, v: [B, Sk, Hk, D]; Sk a multiple of `index.block_size`, Hq a multiple of Hk. With a
            `WindowIndex` (of the keys) the queries are those of the last keys.
        index: computed pairs, as defined by its class. Not differentiated.
        scale: scale of the logits; defaults to 1/sqrt(D).
        backend: as in `plan`.
        return_lse: whether to also return the log-sum-exp of the logits.

    Returns:
        out [B, Sq, Hq, D] in the dtype of q. With `return_lse`, a pair of out and lse, fp32
        [B, Hq, Sq], natural logarithm, -inf for empty rows; gradients flow through both.

    Raises:
        ValueError: if shapes or the type of `index` are invalid, or the backend cannot run here.
    """
    if not isinstance(index, _Computed):
        allowed = "TiledIndex, a TokenChunksIndex or a WindowIndex"
        raise ValueError(f"index is a {type(index).__name__}; it must be a {allowed}")
    if k.shape != v.shape:
        raise ValueError(f"k has shape {k.shape} and v has {v.shape}; they must be equal")
    if index.causal and q.shape[1] != k.shape[1] and not isinstance(index, WindowIndex):
        raise ValueError(
            f"q has {q.shape[1]} tokens and k has {k.shape[1]}; causal attention needs equal "
            "lengths"
        )
    out, lse = _with_lse(q, k, v, index, scale, backend)
    return (out, lse) if return_lse else out


def _with_lse(
    q: Array, k: Array, v: Array, index: _Computed, scale: float | None, backend: str | None
) -> Pair:
    batch, num_queries, num_heads, _ = q.shape
    if isinstance(index, TokenChunksIndex):
        rows = jnp.arange(num_queries // index.block_size, dtype=jnp.int32)
        own = _with_lse(q, k, v, index.own(rows), scale, backend)
        return chunk_attention(q, k, v, index, rows, own, scale=scale, backend=backend)
    scale, blocks = scale_of(scale, q), num_queries // index.block_size
    parts = head_parts(num_heads, k.shape[2], 0, batch * blocks**2 if index.row_sharded else 0)
    if parts == 1:
        return _attention(scale, q, k, v, _planned(q, k, index, backend))

    def attend(q: Array, k: Array, v: Array, index: TiledIndex) -> Pair:
        return _forward(scale, q, k, v, _planned(q, k, index, backend))

    def differentiate(
        q: Array, k: Array, v: Array, dout: Array, index: TiledIndex, lse: Array, delta: Array
    ) -> tuple[Array, Array, Array]:
        return _backward(scale, q, k, v, dout, _planned(q, k, index, backend), lse, delta)

    return attention_in_parts(parts, backend, attend, differentiate, q, k, v, index)


def _planned(q: Array, k: Array, index: TiledIndex | WindowIndex, backend: str | None) -> Plan:
    tiles, columns = index.on_one_device(q.shape[0], q.shape[1], q.shape[2], k.shape[1])
    return plan(q, k, tiles, columns, whole=True, backend=backend)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(scale, q, k, v, plan):
    return _attention_fwd(scale, q, k, v, plan)[0]


def _forward(scale: float, q: Array, k: Array, v: Array, plan: Plan) -> Pair:
    return forward(q, k, v, plan, _column_kv(k, v, plan), scale=scale)


def _attention_fwd(scale, q, k, v, plan):
    out, lse = _forward(scale, q, k, v, plan)
    out, lse = checkpoint_name(out, names.OUTPUT), checkpoint_name(lse, names.LSE)
    return (out, lse), (q, k, v, plan, out, lse)


def _attention_bwd(scale, residuals, cotangents):
    dout, dlse = cotangents
    q, k, v, plan, out, lse = residuals
    # d lse / d logits are the softmax weights, so the cotangent of lse is folded into delta.
    delta = backends.named(plan.backend).delta_of(out, dout) - dlse
    return *_backward(scale, q, k, v, dout, plan, lse, delta), None


_attention.defvjp(_attention_fwd, _attention_bwd)


def _backward(
    scale: float, q: Array, k: Array, v: Array, dout: Array, plan: Plan, lse: Array, delta: Array
) -> tuple[Array, Array, Array]:
    # Columns are gathered again; saving them would take memory until here.
    arrays, column_kv = (q, k, v, dout, lse, delta), _column_kv(k, v, plan)
    grads = backward(*arrays, plan, column_kv, scale=scale, dq_dtype=q.dtype, key_dtype=k.dtype)
    assert grads.dk is not None and grads.dv is not None  # an index always has tiles
    return grads.dq, grads.dk, grads.dv


def _column_kv(k: Array, v: Array, plan: Plan) -> Pair | None:
    if plan.columns is None:
        return None
    tokens = plan.columns.tokens
    return gather_columns(k, tokens), gather_columns(v, tokens)
