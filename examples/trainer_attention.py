"""Attention to packed documents that begin anywhere, for the trainers of the adapters here.

`sparse_attention` needs documents that begin at multiples of its block size and are known outside
of `jax.jit`. Trainers pack documents one after another and pass segment ids into the compiled step.
`segment_attention` moves documents to whole blocks, attends, and moves the results back.
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array

from mtraining_jax import Documents, SampledRows, sparse_attention


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

    A document is a run of equal ids. Beyond the copies, of up to `max_documents` blocks per
    sequence more than q, k and v have, computation grows only by the last block of each document.

    Args:
        q: [B, S, Hq, D].
        k, v: [B, S, Hk, D].
        segment_ids: integers [B, S] or [1, S], possibly traced.
        padding: id of tokens of no document, which get output 0; None: there are none.
        max_documents: documents that a sequence may have. The output of a sequence with more is
            NaN, so that no document is silently dropped.
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
    block_size = options.get("pattern", SampledRows()).block_size
    segment_ids = jnp.broadcast_to(segment_ids, q.shape[:2])
    max_documents = min(max_documents, q.shape[1])
    to, back, table, fits = jax.vmap(lambda ids: _plan(ids, padding, max_documents, block_size))(
        segment_ids
    )
    moved = (_move(x, to, back) for x in (q, k, v))
    documents = Documents(table, block_size)
    out = cast(Array, sparse_attention(*moved, documents=documents, **options))
    return jnp.where(fits[:, None, None, None], _move(out, back, to), jnp.nan)


def _plan(
    ids: Array, padding: int | None, max_documents: int, block_size: int
) -> tuple[Array, Array, Array, Array]:
    """Token of each slot [T], slot of each token [S], table of `Documents`, and whether all fit."""
    tokens = ids.shape[0]
    num_blocks = (tokens + max_documents * (block_size - 1)) // block_size
    slots = num_blocks * block_size
    real = jnp.ones_like(ids, bool) if padding is None else ids != padding
    begins = real & jnp.append(True, ids[1:] != ids[:-1])
    number = jnp.where(real, jnp.cumsum(begins) - 1, max_documents)
    token = jnp.arange(tokens)
    start = jnp.full(max_documents, tokens).at[number].min(token, mode="drop")
    length = jnp.zeros(max_documents, int).at[number].add(1, mode="drop")
    blocks = -(-length // block_size)
    end = jnp.cumsum(blocks)
    first = end - blocks

    def entry(x: Array, document: Array, otherwise: int) -> Array:
        return x.at[document].get(mode="fill", fill_value=otherwise)

    owner = jnp.searchsorted(end, jnp.arange(num_blocks), side="right")
    table = [entry(x, owner, n) for x, n in ((first, num_blocks), (end, 0), (length, 0))]
    slot = jnp.arange(slots)
    document = owner[slot // block_size]
    offset = slot - entry(first, document, 0) * block_size
    used = offset < entry(length, document, 0)
    to = jnp.where(used, entry(start, document, 0) + offset, tokens)
    back = entry(first, number, num_blocks) * block_size + token - entry(start, number, 0)
    return to, back, jnp.stack(table, -1).astype(jnp.int32), begins.sum() <= max_documents


@jax.custom_vjp
def _move(x: Array, to: Array, back: Array) -> Array:
    """Takes x [B, N, ...] at `to`, int32 [B, M]; 0 where it is beyond N. `back` is the inverse."""
    return jax.vmap(lambda x, to: x.at[to].get(mode="fill", fill_value=0))(x, to)


# The gradient of a gather would be a scatter with atomic additions.
_move.defvjp(
    lambda x, to, back: (_move(x, to, back), (to, back)),
    lambda order, dx: (_move(dx, order[1], order[0]), None, None),
)
