"""Losses by context length, in buckets [2^k, 2^(k+1)).

Bucket k has the tokens at positions 2^k to 2^(k+1) - 1, counted from 0; the first has no loss.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mtraining_jax.models.labels import IGNORE_LABEL
from mtraining_jax.utils.text import short_power


def num_buckets(seq_len: int) -> int:
    """The number of buckets of a sequence; the last one may be partly filled."""
    if seq_len < 2:
        raise ValueError(f"seq_len={seq_len} must be at least 2")
    return (seq_len - 1).bit_length()


def bucket_names(count: int) -> list[str]:
    """The first positions of buckets 0 to `count` - 1 as text: 1, 2, 4, ... 512, 1K, ..."""
    return [short_power(2**k) for k in range(count)]


def sums_by_bucket(
    losses_BS: Array, labels_BS: Array, positions_BS: Array, buckets: int
) -> tuple[Array, Array]:
    """Sums losses, fp32 in nats, and counts labels, int32, by bucket of the predicting position.

    Returns [B, K] each, for K buckets.
    """
    # Exactly floor(log2(position of the label)).
    bucket_BS = 31 - lax.clz((positions_BS + 1).astype(jnp.int32))
    inside_KBS = bucket_BS == jnp.arange(buckets, dtype=jnp.int32)[:, None, None]
    counted_KBS = inside_KBS & (labels_BS != IGNORE_LABEL)
    sums_KB = jnp.sum(jnp.where(inside_KBS, losses_BS, 0.0), axis=2)
    return sums_KB.T, jnp.sum(counted_KBS, axis=2, dtype=jnp.int32).T


def means_by_bucket(losses: np.ndarray) -> tuple[list[float], list[int]]:
    """The mean loss and the number of tokens of each bucket, from fp32 [S - 1] of tokens 1 on."""
    edges = [2**k - 1 for k in range(num_buckets(len(losses) + 1))]
    parts = np.split(losses.astype(np.float64), edges[1:])
    return [float(part.mean()) for part in parts], [len(part) for part in parts]
