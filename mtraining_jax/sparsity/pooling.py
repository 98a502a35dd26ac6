"""Means over blocks, with the same bits on any number of ranks.

Additions stand in a written-out order, and no product feeds one (see `estimate.py`).
"""

import jax.numpy as jnp
from jax import Array

from mtraining_jax.sparsity.estimate import ordered_sum


def block_means(x_BnHD: Array, block_ids: Array, valid_len: Array | None) -> Array:
    """Means over the tokens of each block.

    Args:
        x_BnHD: [B, n, H, D], tokens of some blocks.
        block_ids: int32 [n/g], global number of each block.
        valid_len: int32 scalar, tokens before the padding, which is left out; None for none.

    Returns:
        fp32 [B, H, n/g, D]; 0 for a block of padding.
    """
    size = x_BnHD.shape[1] // block_ids.shape[0]
    blocks = x_BnHD.reshape(x_BnHD.shape[0], -1, size, *x_BnHD.shape[2:])
    blocks = blocks.transpose(0, 3, 1, 2, 4).astype(jnp.float32)
    count = jnp.full(block_ids.shape, size, jnp.int32)
    if valid_len is not None:
        count = jnp.clip(valid_len - block_ids * size, 0, size)
        counts = jnp.arange(size, dtype=jnp.int32) < count[:, None]
        blocks = jnp.where(counts[..., None], blocks, 0.0)
    return ordered_sum(blocks) / jnp.maximum(count, 1).astype(jnp.float32)[:, None]


def energy_share(x: Array, band: Array, up_to_each: bool = False) -> Array:
    """Norm of some numbers of vectors over the norm of all of them.

    Args:
        x: fp32 [..., n, D].
        band: bool [D], the numbers.
        up_to_each: whether vectors 0 .. i are taken together for vector i.

    Returns:
        fp32 [..., n]; 1 where all numbers are 0.
    """
    # The minimum keeps the squares from being contracted with the additions.
    squares = jnp.minimum(x * x, jnp.finfo(jnp.float32).max)
    energies = [ordered_sum(y[..., None])[..., 0] for y in (jnp.where(band, squares, 0.0), squares)]
    if up_to_each:
        energies = [_running_sum(y) for y in energies]
    some, all_of_them = energies
    return jnp.where(all_of_them > 0, jnp.sqrt(some / jnp.maximum(all_of_them, 1e-30)), 1.0)


def _running_sum(x: Array) -> Array:
    """Sums over 0 .. i of the last axis, in steps of 1, 2, 4, ..."""
    step = 1
    while step < x.shape[-1]:
        earlier = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(step, 0)])[..., : x.shape[-1]]
        x, step = x + earlier, 2 * step
    return x
