"""Checks of the inputs of a selection."""

import dataclasses

from jax import Array

from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.scores import estimate


def check_selection(q: Array, k: Array, context: SelectionContext, block_size: int) -> float:
    """Checks queries and keys of a selection.

    Raises:
        ValueError: if shapes, dtypes or sizes are invalid.
    """
    if q.ndim != 4 or k.ndim != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape} and k {k.shape} must be [B, n, H, D] with equal B, n and D")
    if q.dtype != k.dtype:
        raise ValueError(f"q is {q.dtype} but k is {k.dtype}; they must have the same dtype")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} key/value heads"
        )
    blocks, num_blocks = context.block_ids.shape, context.num_blocks
    if blocks != (q.shape[1] // block_size,) or q.shape[1] % block_size:
        raise ValueError(
            f"{q.shape[1]} local tokens do not match {blocks} blocks of block_size={block_size}"
        )
    if num_blocks > estimate.MAX_BLOCKS or num_blocks * block_size > estimate.MAX_TOKENS:
        raise ValueError(
            f"num_blocks={num_blocks} of block_size={block_size} exceeds the limit of "
            f"{estimate.MAX_BLOCKS} blocks and {estimate.MAX_TOKENS} tokens"
        )
    scale = context.scale_for(q.shape[3])
    if not scale > 0:
        raise ValueError(f"scale={scale} must be positive")
    return scale


def with_dense_documents(
    q: Array, k: Array, context: SelectionContext, block_size: int, blocks: int
) -> SelectionContext:
    """Checks a selection, and returns its context with documents of fewer blocks dense."""
    check_selection(q, k, context, block_size)
    return dataclasses.replace(context, dense_below=blocks)
