"""Means over blocks, bit-identical for any number of ranks.

Additions have a fixed order, and no product feeds an addition (see `estimate.py`).
"""

import jax.numpy as jnp
from jax import Array

from mtraining_jax.selection.scores.estimate import ordered_sum


def block_means(x_BnHD: Array, block_ids: Array, ends: Array | None) -> Array:
    """Computes the mean over the tokens of each block: fp32 [B, H, n/g, D]; 0 for padding.

    `ends`, int32 [B or 1, n/g] from `SelectionContext.ends`, is where the padding of a block begins.
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


def energy_share(x: Array, band: Array) -> Array:
    """Returns the norm of the components in a band, bool [D], over the norm of whole vectors.

    fp32 [..., n] for vectors fp32 [..., n, D]; 1 for zero vectors.
    """
    return _share(*_energies(x, band))


def energy_share_up_to_each(x: Array, band: Array, first: Array | None) -> Array:
    """Variant of `energy_share` that combines vectors first_i .. i of a sequence for vector i.

    `first`, int32 [B, n], is equal within a run of vectors; None for 0.
    """
    if first is not None:
        first = first[:, None]
    return _share(*(_running_sum(y, first) for y in _energies(x, band)))


def _energies(x: Array, band: Array) -> tuple[Array, Array]:
    """Returns squared norms [..., n] of the components in the band, and of whole vectors."""
    # The minimum prevents contraction of the squares with the additions.
    squares = jnp.minimum(x * x, jnp.finfo(jnp.float32).max)
    some, every = (
        ordered_sum(y[..., None])[..., 0] for y in (jnp.where(band, squares, 0.0), squares)
    )
    return some, every


def _share(some: Array, every: Array) -> Array:
    return jnp.where(every > 0, jnp.sqrt(some / jnp.maximum(every, 1e-30)), 1.0)


def _running_sum(x: Array, first: Array | None) -> Array:
    """Sums first .. i of the last axis in steps of 1, 2, 4, ...; bits as for the run on its own."""
    step = 1
    places = jnp.arange(x.shape[-1], dtype=jnp.int32)
    while step < x.shape[-1]:
        earlier = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(step, 0)])[..., : x.shape[-1]]
        if first is not None:
            earlier = jnp.where(places - step >= first, earlier, 0.0)
        x, step = x + earlier, 2 * step
    return x
