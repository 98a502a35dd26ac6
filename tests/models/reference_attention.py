"""Plain dense attention with a mask from positions: the reference for short sequences."""

import jax
import jax.numpy as jnp
from jax import Array

from mtraining_jax.attention.inputs import AttentionInputs
from mtraining_jax.models.transformer import Attention


def dense_attention(positions: Array) -> Attention:
    """Causal attention over tokens in any order, fp32, with all S x S scores in memory.

    Args:
        positions: int32 [S] or [B, S]; a query attends to keys at its own position or before.

    Returns:
        A callable for `Transformer`: q [B, S, Hq, D], k and v [B, S, Hk, D] -> out [B, S, Hq, D] in
        q's dtype, scores scaled by D**-0.5, and the stats {"density": 1}.
    """

    def attention(
        q_BSHD: Array, k_BSHkD: Array, v_BSHkD: Array, inputs: AttentionInputs | None = None
    ) -> tuple[Array, dict[str, Array]]:
        batch, length, heads, dim = q_BSHD.shape
        kv_heads = k_BSHkD.shape[2]
        q32 = q_BSHD.astype(jnp.float32).reshape(batch, length, kv_heads, heads // kv_heads, dim)
        k32, v32 = k_BSHkD.astype(jnp.float32), v_BSHkD.astype(jnp.float32)
        exact = jax.lax.Precision.HIGHEST
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", q32, k32, precision=exact) * dim**-0.5
        rows = positions if positions.ndim == 2 else positions[None]
        distance = rows[:, None, None, :, None] - rows[:, None, None, None, :]
        seen = distance >= 0
        if inputs is not None and inputs.window is not None:
            seen &= distance < inputs.window
        scores = jnp.where(seen, scores, -jnp.inf)
        if inputs is not None and inputs.sinks is not None:
            sinks = inputs.sinks.reshape(kv_heads, -1)[:, :, None, None]
            scores = jnp.concatenate([scores, jnp.broadcast_to(sinks, scores[..., :1].shape)], -1)
        weights = jax.nn.softmax(scores, axis=-1)[..., :length]
        out = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v32, precision=exact)
        out_BSHD = out.reshape(q_BSHD.shape).astype(q_BSHD.dtype)
        return out_BSHD, {"density": jnp.ones((), jnp.float32)}

    return attention
