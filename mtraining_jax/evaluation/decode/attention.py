"""Dense attention of one query to keys that lie on several ranks."""

import math

import jax.numpy as jnp
from jax import Array, lax

# Tokens that one product with values adds up, if they divide the cache. A single product over a
# long cache would have so few results that most of a GPU were idle.
CHUNK = 512


def attend_to_cache(
    q_BHD: Array, k_BHkSD: Array, v_BHkSD: Array, seen_S: Array, axis_names: tuple[str, ...]
) -> Array:
    """Softmax over the keys of all ranks; inside `jax.shard_map`.

    Each rank computes its part relative to its largest logit. The parts are brought to the
    largest of all ranks and added up in fp32: exact attention, whatever the number of ranks.

    Args:
        q_BHD: [B, Hq, D], the same on all ranks, rotated and unscaled.
        k_BHkSD, v_BHkSD: keys and values of this rank.
        seen_S: bool [S], which of them count. Some key counts on some rank.
        axis_names: mesh axes that the keys are spread over.

    Returns:
        fp32 [B, Hq, D].
    """
    batch, heads, dim = q_BHD.shape
    kv_heads, tokens = k_BHkSD.shape[1:3]
    q = q_BHD.reshape(batch, kv_heads, -1, dim)
    exact = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    kinds = dict(precision=exact, preferred_element_type=jnp.float32)
    logits = jnp.einsum("bhgd,bhsd->bhgs", q, k_BHkSD, **kinds) / math.sqrt(dim)
    logits = jnp.where(seen_S, logits, -jnp.inf)
    peak = logits.max(-1)
    # A rank may hold no key that counts.
    weights = jnp.exp(logits - jnp.where(peak == -jnp.inf, 0.0, peak)[..., None])
    total = weights.sum(-1)
    size = math.gcd(tokens, CHUNK)
    weights = weights.astype(v_BHkSD.dtype).reshape(*weights.shape[:3], -1, size)
    values = v_BHkSD.reshape(batch, kv_heads, -1, size, dim)
    out = jnp.einsum("bhgcs,bhcsd->bhcgd", weights, values, **kinds).sum(2)
    if lax.axis_size(axis_names) == 1:
        return (out / total[..., None]).reshape(batch, heads, dim)
    # One exchange a layer: for so few numbers its latency is all that counts.
    own = jnp.concatenate([out, total[..., None], peak[..., None]], axis=-1)
    parts = lax.all_gather(own, axis_names)
    out, total, peak = parts[..., :dim], parts[..., dim], parts[..., dim + 1]
    share = jnp.exp(peak - peak.max(0))
    out = (out * share[..., None]).sum(0) / (total * share).sum(0)[..., None]
    return out.reshape(batch, heads, dim)
