"""Embedding lookup with a deterministic gradient, also on GPUs.

XLA would add the rows of equal ids by atomic additions, in the order in which thread blocks arrive.
Here tokens are sorted, and sums are products with 0/1 matrices.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

# Tokens per matrix product: larger blocks need more products per token, but fewer carried sums.
BLOCK = 256


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def embed(table_VE: Array, tokens: Array, dtype: jnp.dtype) -> Array:
    """Looks up the rows [..., E] of token ids, int32 [...], in fp32 [V, E]."""
    return jnp.take(table_VE, tokens, axis=0).astype(dtype)


def _forward(table_VE: Array, tokens: Array, dtype: jnp.dtype) -> tuple[Array, tuple[Array, int]]:
    return embed(table_VE, tokens, dtype), (tokens, table_VE.shape[0])


def _backward(dtype: jnp.dtype, kept: tuple[Array, int], d_rows: Array) -> tuple[Array, None]:
    tokens, size = kept
    d_rows, tokens = d_rows.reshape(-1, d_rows.shape[-1]), tokens.reshape(-1)
    # A CPU adds in token order anyway.
    add = functools.partial(_add_in_order, size=size)
    ordered = functools.partial(sum_rows, size=size)
    return lax.platform_dependent(d_rows, tokens, cpu=add, default=ordered), None


embed.defvjp(_forward, _backward)


def _add_in_order(rows_NE: Array, numbers: Array, size: int) -> Array:
    zeros = jnp.zeros((size, rows_NE.shape[1]), jnp.float32)
    return zeros.at[numbers].add(rows_NE.astype(jnp.float32), mode="drop")


def sum_rows(rows_NE: Array, numbers: Array, size: int) -> Array:
    """Sums rows [N, E] with equal ids, int32 [N], in an order that depends only on the ids.

    In each block of sorted rows, one product with the 0/1 matrix of equal ids gives all sums. One
    more product adds up the sums of an id that continues in later blocks. Returns fp32 [size, E];
    ids of `size` or more are ignored.
    """
    exact = lax.Precision.HIGHEST
    numbers = jnp.pad(numbers, (0, -len(numbers) % BLOCK), constant_values=size)
    order = jnp.argsort(numbers)
    numbers = numbers[order].reshape(-1, BLOCK)
    rows = jnp.take(rows_NE, order, axis=0, mode="fill", fill_value=0)
    rows = rows.reshape(*numbers.shape, -1)
    shared = (numbers[:, :, None] == numbers[:, None, :]).astype(rows.dtype)
    sums = jnp.einsum(
        "btu,bue->bte",
        shared,
        rows,
        preferred_element_type=jnp.float32,
        precision=exact if rows.dtype == jnp.float32 else None,
    )
    block = jnp.arange(len(numbers))
    first, last = numbers[:, 0], numbers[:, -1]
    begun = (block < block[:, None]) & (last == first[:, None])  # [block, earlier block]
    carried = jnp.dot(begun.astype(jnp.float32), sums[:, -1], precision=exact)
    sums += jnp.where((numbers == first[:, None])[..., None], carried[:, None], 0)
    flat = numbers.reshape(-1)
    ends = jnp.append(flat[1:] != flat[:-1], True) & (flat < size)
    # Sums that are not written get unique indices beyond the table.
    slots = jnp.where(ends, flat, size + jnp.arange(len(flat)))
    sums = sums.reshape(len(flat), -1)
    zeros = jnp.zeros((size, sums.shape[1]), jnp.float32)
    return zeros.at[slots].set(sums, mode="drop", unique_indices=True)
