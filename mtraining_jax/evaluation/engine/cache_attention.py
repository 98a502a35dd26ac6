"""Dense attention of one query over a KV cache that is sharded over ranks."""

import functools
import math

import jax.numpy as jnp
from jax import Array, lax

# Tokens per product with values, if they divide the cache. A single product over a long cache would
# have so few results that most of a GPU would be idle.
CHUNK = 512


def attend_to_cache(
    q_BHD: Array, k_BHkSD: Array, v_BHkSD: Array, seen_S: Array, axis_names: tuple[str, ...]
) -> Array:
    """Softmax attention over the keys of all ranks, fp32 [B, Hq, D]; inside `jax.shard_map`.

    Queries are replicated, rotated and unscaled. `seen_S` says which keys of this rank to attend
    to; there is at least one over all ranks.
    """
    batch, heads, dim = q_BHD.shape
    kv_heads, tokens = k_BHkSD.shape[1:3]
    q = q_BHD.reshape(batch, kv_heads, -1, dim)
    exact = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    einsum = functools.partial(jnp.einsum, precision=exact, preferred_element_type=jnp.float32)
    logits = einsum("bhgd,bhsd->bhgs", q, k_BHkSD) / math.sqrt(dim)
    logits = jnp.where(seen_S, logits, -jnp.inf)
    peak = logits.max(-1)
    # A rank may have no key to attend to.
    weights = jnp.exp(logits - jnp.where(peak == -jnp.inf, 0.0, peak)[..., None])
    total = weights.sum(-1)
    size = math.gcd(tokens, CHUNK)
    weights = weights.astype(v_BHkSD.dtype).reshape(*weights.shape[:3], -1, size)
    values = v_BHkSD.reshape(batch, kv_heads, -1, size, dim)
    out = einsum("bhgcs,bhcsd->bhcgd", weights, values).sum(2)
    if lax.axis_size(axis_names) == 1:
        return (out / total[..., None]).reshape(batch, heads, dim)
    # One exchange per layer, limited by latency for so few numbers.
    own = jnp.concatenate([out, total[..., None], peak[..., None]], axis=-1)
    parts = lax.all_gather(own, axis_names)
    out, total, peak = parts[..., :dim], parts[..., dim], parts[..., dim + 1]
    share = jnp.exp(peak - peak.max(0))
    out = (out * share[..., None]).sum(0) / (total * share).sum(0)[..., None]
    return out.reshape(batch, heads, dim)
