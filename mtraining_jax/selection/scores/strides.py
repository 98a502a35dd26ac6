"""Attention of strides of tokens, by sums along antidiagonals (arXiv 2503.16428)."""

import jax.numpy as jnp
from jax import Array

from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.scores import row_scores


def stride_masses(
    q: Array, k: Array, context: SelectionContext, block_size: int, stride: int
) -> Array:
    """Computes the mean softmax mass that the query strides of a block give to key blocks.

    The logit of two strides is the mean product of query s-1-i of one and key i of the other, for
    i < s = `stride`. Other arguments as in `RowPattern.scores`.

    Returns:
        fp32 [B, Hq, n/g, NB].
    """
    per_block = block_size // stride
    positions = context.block_ids[:, None] * per_block + jnp.arange(per_block, dtype=jnp.int32)
    ends = context.ends(context.block_ids)
    if ends is not None:  # padding adds nothing to the stride it completes
        blocks = jnp.arange(context.num_blocks, dtype=jnp.int32)
        q = row_scores.without_padding(q, context.block_ids, ends)
        ends_of_keys = context.ends(blocks)
        assert ends_of_keys is not None
        k = row_scores.without_padding(k, blocks, ends_of_keys)
        positions = jnp.where(positions * stride < ends[..., None], positions, -1)

    def strides(x: Array) -> Array:  # [B, n, H, D] -> [B, H, blocks, strides, s * D]
        x = x.reshape(x.shape[0], -1, per_block, stride, *x.shape[2:])
        x = x.transpose(0, 4, 1, 2, 3, 5)
        return x.reshape(*x.shape[:4], -1)

    # Reversed within a stride: query s-1-i meets key i.
    backwards = q.reshape(q.shape[0], -1, stride, *q.shape[2:])[:, :, ::-1].reshape(q.shape)
    return row_scores.block_masses(
        strides(backwards),
        strides(k),
        positions,
        context.first_blocks(context.block_ids),
        scale=context.scale_for(q.shape[-1]) / stride,
        like=q,
        backend=context.backend,
    )
