"""Attention to packed documents that begin anywhere, for the trainers of the adapters here.

Trainers pack documents one after another and pass segment ids into the compiled step.
"""

from typing import Any, cast

import jax.numpy as jnp
from jax import Array

from mtraining_jax import SampledRows, realign, sparse_attention


def refuse(name: str, options: dict[str, Any]) -> None:
    """Raises ValueError for the first option that is set: not None, False or 0."""
    for option, value in options.items():
        if value is not None and not (isinstance(value, int | float) and not value):
            shown = f"={value}" if isinstance(value, int | float | str) else ""
            raise ValueError(f"{option}{shown} is not supported by {name}; leave it unset")


def segment_attention(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array,
    *,
    padding: int | None,
    max_documents: int,
    **options: Any,
) -> Array:
    """Computes `sparse_attention` within documents that begin at any token.

    See `mtraining_jax.realign`.

    Args:
        q: [B, S, Hq, D].
        k, v: [B, S, Hk, D].
        segment_ids: integers [B, S] or [1, S], possibly traced.
        padding: id of tokens of no document, which get output 0; None: there are none.
        max_documents: documents that a sequence may have; the output of one with more is NaN.
        **options: arguments of `sparse_attention`, without `sharding` of tokens.

    Returns:
        [B, S, Hq, D] in the dtype of q.
    """
    sharding = options.get("sharding")
    if sharding is not None and sharding.sequence:
        raise ValueError(
            f"packed documents cannot be sharded over tokens, here by {sharding.sequence}; "
            "shard the batch and heads only, or do not pack"
        )
    documents, to_blocks, from_blocks = realign(
        jnp.broadcast_to(segment_ids, q.shape[:2]),
        max_documents,
        block_size=options.get("pattern", SampledRows()).block_size,
        padding=padding,
    )
    q, k, v = map(to_blocks, (q, k, v))
    return from_blocks(cast(Array, sparse_attention(q, k, v, documents=documents, **options)))
