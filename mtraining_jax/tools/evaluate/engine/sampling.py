"""Samples the next token, and scores a given one."""

import jax
import jax.numpy as jnp
from jax import Array

# Sampled from logits that are NaN or infinite.
NO_TOKEN = -1


def next_token(
    logits_BV: Array, kind: str, temperature: Array, top_p: Array, seed: Array, number: Array
) -> Array:
    """Samples the next token of each sequence, int32 [B]; `number` tokens were sampled before.

    `NO_TOKEN` where the highest logit is not finite.
    """
    peak_B1 = jnp.max(logits_BV, axis=-1, keepdims=True)
    if kind == "greedy":
        token_B = jnp.argmax(logits_BV, -1)
    else:
        # Relative to the highest logit, which then never overflows.
        logits_BV = (logits_BV - peak_B1) / temperature
        if kind == "top_p":
            logits_BV = jnp.where(kept_tokens(logits_BV, top_p), logits_BV, -jnp.inf)
        key = jax.random.fold_in(jax.random.key(seed), number)
        # Each sequence with the numbers that it would have alone.
        token_B = jax.vmap(lambda logits: jax.random.categorical(key, logits))(logits_BV)
    return jnp.where(jnp.isfinite(peak_B1[:, 0]), token_B, NO_TOKEN).astype(jnp.int32)


@jax.jit
def judge(logits_BV: Array, label_B: Array) -> tuple[Array, Array]:
    """Returns the log probability of the label, fp32 [B], and whether it is the most likely."""
    log_probs = jax.nn.log_softmax(logits_BV, axis=-1)
    own = jnp.take_along_axis(log_probs, label_B[:, None], axis=-1)[:, 0]
    return own, jnp.argmax(logits_BV, axis=-1) == label_B


def kept_tokens(logits_BV: Array, top_p: Array) -> Array:
    """Selects the fewest tokens with a probability of `top_p`: bool [B, V] (arXiv 1904.09751).

    At least the most likely one, and all that are as likely as the last of them.
    """
    descending = jnp.sort(logits_BV, axis=-1, descending=True)
    probabilities = jax.nn.softmax(descending, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    highest = descending[..., :1]
    lowest = jnp.min(jnp.where(before < top_p, descending, highest), axis=-1, keepdims=True)
    return logits_BV >= lowest
