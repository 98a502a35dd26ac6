"""Alignment to blocks of documents that begin at any token."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from mtraining_jax.documents import Documents, check_positive
from mtraining_jax.utils.errors import UserError


def realign(
    segment_ids: Array, max_documents: int, *, block_size: int = 128, padding: int | None = 0
) -> tuple[Documents, Callable[[Array], Array], Callable[[Array], Array]]:
    """Aligns documents that begin at any token to blocks, inside `jax.jit` too.

    For trainers that pack documents one after another and pass segment ids into a compiled step:

        documents, to_blocks, from_blocks = realign(segment_ids, max_documents=64)
        q, k, v = map(to_blocks, (q, k, v))  # after rotary embedding
        out = from_blocks(sparse_attention(q, k, v, documents=documents))

    Beyond the copies, of up to `max_documents` blocks per sequence more than the arrays have,
    computation grows only by the last block of each document.

    Args:
        segment_ids: integers [B, S] or [1, S], possibly traced; a run of equal ids is a document.
        max_documents: documents that a sequence may have (static).
        block_size: tokens per block (g).
        padding: id of tokens of no document; None: there are none.

    Returns:
        The documents, and two differentiable functions. `to_blocks` copies arrays [B, S, ...] into
        blocks, [B, T, ...], with zeros between documents; `from_blocks` is its inverse, with zeros
        for padding, and NaN in sequences of more than `max_documents`, so that no document is
        silently dropped.

    Raises:
        UserError: if an argument is invalid.
    """
    if jnp.ndim(segment_ids) != 2 or not jnp.issubdtype(jnp.result_type(segment_ids), jnp.integer):
        raise UserError(
            f"segment_ids is {jnp.result_type(segment_ids)} {list(jnp.shape(segment_ids))}; "
            "expected integers [batch, tokens]"
        )
    for name, value in (("block_size", block_size), ("max_documents", max_documents)):
        check_positive(name, value)
    most = min(max_documents, segment_ids.shape[1])
    plan = functools.partial(_alignment, padding=padding, most=most, block_size=block_size)
    to, back, (first, end, tokens), fits = jax.vmap(plan)(jnp.asarray(segment_ids))

    def from_blocks(x: Array) -> Array:
        return jnp.where(fits.reshape(-1, *[1] * (x.ndim - 1)), _move(x, back, to), jnp.nan)

    return Documents(first, end, tokens, block_size), lambda x: _move(x, to, back), from_blocks


def _alignment(
    ids: Array, padding: int | None, most: int, block_size: int
) -> tuple[Array, Array, tuple[Array, ...], Array]:
    """Token of each slot [T], slot of each token [S], fields of `Documents`, whether all fit."""
    num_tokens = ids.shape[0]
    num_blocks = (num_tokens + most * (block_size - 1)) // block_size
    real = jnp.ones_like(ids, bool) if padding is None else ids != padding
    begins = real & jnp.append(True, ids[1:] != ids[:-1])
    number = jnp.where(real, jnp.cumsum(begins) - 1, most)
    token = jnp.arange(num_tokens)
    start = jnp.full(most, num_tokens).at[number].min(token, mode="drop")
    length = jnp.zeros(most, int).at[number].add(1, mode="drop")
    end = jnp.cumsum(-(-length // block_size))
    first = end + -length // block_size

    def entry(x: Array, document: Array, otherwise: int) -> Array:
        return x.at[document].get(mode="fill", fill_value=otherwise)

    owner = jnp.searchsorted(end, jnp.arange(num_blocks), side="right")
    fields = ((first, num_blocks), (end, 0), (length, 0))
    fields = tuple(entry(x, owner, none).astype(jnp.int32) for x, none in fields)
    slot = jnp.arange(num_blocks * block_size)
    document = owner[slot // block_size]
    offset = slot - entry(first, document, 0) * block_size
    used = offset < entry(length, document, 0)
    to = jnp.where(used, entry(start, document, 0) + offset, num_tokens)
    back = entry(first, number, num_blocks) * block_size + token - entry(start, number, 0)
    return to, back, fields, begins.sum() <= most


def _move(x: Array, to: Array, back: Array) -> Array:
    """Takes x [B, N, ...] at `to`, int32 [B or 1, M]; 0 where it is beyond N. Inverse: `back`."""
    return _moved(x, *(jnp.broadcast_to(at, (len(x), at.shape[1])) for at in (to, back)))


@jax.custom_vjp
def _moved(x: Array, to: Array, back: Array) -> Array:
    return jax.vmap(lambda x, to: x.at[to].get(mode="fill", fill_value=0))(x, to)


# The gradient of a gather would be a scatter with atomic additions.
_moved.defvjp(
    lambda x, to, back: (_moved(x, to, back), (to, back)),
    lambda order, dx: (_moved(dx, order[1], order[0]), None, None),
)
