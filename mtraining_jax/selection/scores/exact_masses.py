"""Key blocks with the largest exact attention mass, without a causal mask (arXiv 2502.21079)."""

import jax.numpy as jnp
from jax import Array

from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.rules import top_p
from mtraining_jax.selection.scores import row_scores


def exact_masses(q: Array, k: Array, context: SelectionContext, block_size: int) -> Array:
    """Computes the mean softmax mass that each query block gives to each key block.

    Args:
        q: [B, S, Hq, D].
        k: [B, S, Hk, D].
        context: the whole sequence on one device; only `scale` and `backend` are read.
        block_size: tokens per block (g).

    Returns:
        fp32 [B, Hq, S/g, S/g], multiples of 2^-30; rows sum to 1 up to rounding.
    """
    positions = jnp.full((q.shape[1] // block_size, block_size), k.shape[1] - 1, jnp.int32)
    return row_scores.block_masses(
        row_scores.by_blocks(q, block_size),
        row_scores.by_blocks(k, block_size),
        positions,
        scale=context.scale_for(q.shape[-1]),
        like=q,
        backend=context.backend,
    )


def recall(masses: Array, kept: Array) -> Array:
    """Returns the fraction of mass on kept blocks: fp32 [B, Hq].

    Args:
        masses: fp32 [B, Hq, NB, NB], from `exact_masses`.
        kept: bool [B, Hq, NB, NB].
    """
    return jnp.where(kept, masses, 0.0).sum((-2, -1)) / masses.sum((-2, -1))


def largest(masses: Array, count: Array, first_blocks: int, last_blocks: int) -> Array:
    """Marks `count` blocks of largest mass of each row, int32; the first and last come first."""
    blocks = jnp.arange(masses.shape[-1], dtype=jnp.int32)
    forced = (blocks < first_blocks) | (blocks >= masses.shape[-1] - last_blocks)
    keys = top_p.float_keys(jnp.where(forced, jnp.inf, masses))[..., None]
    rule = top_p.Rule(0, count[..., None])
    return top_p.kept_entries(keys, rule)[0][..., 0]
