"""The oracle: attention with an explicit S x S mask, differentiated by JAX; slow and simple."""

import jax.numpy as jnp
from jax import Array, lax


def reference_attention(
    q: Array, k: Array, v: Array, mask: Array, scale: float | None = None
) -> tuple[Array, Array]:
    """Computes softmax(scale * q k^T, over the pairs of `mask`) v, in fp32 (fp64 for fp64 inputs).

    Args:
        q: [B, Sq, Hq, D].
        k, v: [B, Sk, Hk, D] with Hq a multiple of Hk.
        mask: bool [B, Hq, Sq, Sk]. Rows without pairs have output 0 and lse -inf.
        scale: scale of the logits; defaults to 1/sqrt(D).

    Returns:
        out [B, Sq, Hq, D] and lse [B, Hq, Sq] (natural log), in the accumulation type.
    """
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    factor: float = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    k = jnp.repeat(k.astype(dtype), group, axis=2)
    v = jnp.repeat(v.astype(dtype), group, axis=2)
    highest = lax.Precision.HIGHEST
    logits = factor * jnp.einsum("bqhd,bkhd->bhqk", q.astype(dtype), k, precision=highest)
    empty = ~mask.any(-1)
    # Empty rows get one finite logit and zero weight, so that no NaN enters gradients.
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
