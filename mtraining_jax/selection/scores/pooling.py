"""Means over blocks, bit-identical for any number of ranks.

Additions have a fixed order, and no product feeds an addition (see `estimate.py`).
"""

import jax.numpy as jnp
from jax import Array

from mtraining_jax.selection.scores.estimate import ordered_sum


def block_means(x_BnHD: Array, block_ids: Array, ends: Array | None) -> Array:
    """Computes the mean over the tokens of each block: fp32 [B, H, n/g, D]; 0 for padding.

    `ends`, int32 [B or 1, n/g] from `SelectionContext.ends`, is where padding begins.
    """
    size = x_BnHD.shape[1] // block_ids.shape[0]
    blocks = x_BnHD.reshape(x_BnHD.shape[0], -1, size, *x_BnHD.shape[2:])
    blocks = blocks.transpose(0, 3, 1, 2, 4).astype(jnp.float32)
    count = jnp.full((1, *block_ids.shape), size, jnp.int32)
    if ends is not None:
        count = jnp.clip(ends - block_ids * size, 0, size)
        counts = jnp.arange(size, dtype=jnp.int32) < count[..., None]
        blocks = jnp.where(counts[:, None, ..., None], blocks, 0.0)
    return ordered_sum(blocks) / jnp.maximum(count, 1).astype(jnp.float32)[:, None, :, None]
