"""The oracle: attention with an explicit S x S mask, differentiated by JAX itself.

Slow and plain on purpose. Every backend is tested against it.
"""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.index import BlockSparseIndex, DenseIndex, Index


def mask_from_index(index: Index, seq_len: int) -> Array:
    """The pairs that an index computes, as bool [B, Hq, S, S] (query, key); dense [1, 1, S, S]."""
    g = index.block_size
    position = jnp.arange(seq_len)
    query, key = position[:, None], position[None, :]
    if isinstance(index, DenseIndex):
        mask = key <= query if index.causal else jnp.ones((seq_len, seq_len), bool)
        return mask[None, None]
    if isinstance(index, BlockSparseIndex):
        slots = jnp.arange(index.key_blocks.shape[-1])
        live = slots < index.key_count[..., None]
        blocks = jnp.arange(seq_len // g)
        listed = (index.key_blocks[..., None] == blocks) & live[..., None]
        block_mask = listed.any(-2)  # [B, Hq, nQ, nK]
        mask = jnp.repeat(jnp.repeat(block_mask, g, axis=-2), g, axis=-1)
        return mask & (key <= query) if index.causal else mask
    distance = query // g - key // g
    slots = jnp.arange(index.slash_blocks.shape[-1])
    slash = jnp.where(slots < index.slash_count[..., None], index.slash_blocks, -1)
    in_slash = (slash[..., None, None, :] == distance[..., None]).any(-1)
    slots = jnp.arange(index.vertical_tokens.shape[-1])
    vertical = jnp.where(slots < index.vertical_count[..., None], index.vertical_tokens, -1)
    in_vertical = (vertical[..., None] == position).any(-2)[..., None, :]
    return (in_slash | in_vertical) & (key <= query)


def reference_attention(
    q: Array, k: Array, v: Array, mask: Array, scale: float | None = None
) -> tuple[Array, Array]:
    """softmax(scale * q k^T, over the pairs of `mask`) v, in fp32 (fp64 for fp64 inputs).

    Args:
        q: [B, Sq, Hq, D].
        k: [B, Sk, Hk, D] with Hq a multiple of Hk.
        v: shape of k.
        mask: bool [B, Hq, Sq, Sk]. A row without any pair gives output 0 and lse -inf.
        scale: default 1/sqrt(D).

    Returns:
        out [B, Sq, Hq, D] and lse [B, Hq, Sq] (natural log), in the accumulation type.
    """
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    k = jnp.repeat(k.astype(dtype), group, axis=2)
    v = jnp.repeat(v.astype(dtype), group, axis=2)
    highest = lax.Precision.HIGHEST
    logits = scale * jnp.einsum("bqhd,bkhd->bhqk", q.astype(dtype), k, precision=highest)
    empty = ~mask.any(-1)
    # An empty row is given one finite logit and zero weight, so that no NaN enters gradients.
    logits = jnp.where(mask, logits, -jnp.inf)
    logits = jnp.where(empty[..., None], 0.0, logits)
    peak = lax.stop_gradient(logits.max(-1, keepdims=True))
    weights = jnp.where(mask, jnp.exp(logits - peak), 0.0)
    total = weights.sum(-1)
    safe_total = jnp.where(empty, 1.0, total)
    weights = weights / safe_total[..., None]
    out = jnp.einsum("bhqk,bkhd->bqhd", weights, v, precision=highest)
    lse = jnp.where(empty, -jnp.inf, jnp.log(safe_total) + peak[..., 0])
    return out, lse
