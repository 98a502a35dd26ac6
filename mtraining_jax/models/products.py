"""Matrix products, exact for fp32 inputs (by default, GPUs use TF32), and their chunks."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax


def dot(equation: str, a: Array, b: Array) -> Array:
    """An einsum in the dtype of `a`; an fp32 result and a cast would write twice the bytes."""
    return jnp.einsum(equation, a, b, precision=precision_of(a))


def dot32(equation: str, a: Array, b: Array) -> Array:
    """An einsum with an fp32 result."""
    return jnp.einsum(equation, a, b, precision=precision_of(a), preferred_element_type=jnp.float32)


def precision_of(a: Array) -> lax.Precision | None:
    """The precision at which a product is exact for inputs like `a`."""
    return lax.Precision.HIGHEST if a.dtype == jnp.float32 else None


def num_chunks(tokens: int, chunk_size: int) -> int:
    """The number of equal chunks of at most `chunk_size` tokens.

    The smallest that divides `tokens`, if less than twice as many as needed; otherwise as many as
    needed, the last one with padding.
    """
    needed = -(-tokens // chunk_size)
    return next((count for count in range(needed, 2 * needed) if tokens % count == 0), needed)


def first_chunks(tokens: int, chunk_size: int, chunks: int) -> int:
    """How many tokens the first `chunks` of `num_chunks` have; at most all."""
    return min(chunks * -(-tokens // num_chunks(tokens, chunk_size)), tokens)


def chunked(x: Array, size: int, fill: Any = 0) -> Array:
    """Splits [T, ...] into chunks [n, size, ...], the last one padded with `fill`."""
    if padding := -len(x) % size:
        x = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1), constant_values=fill)
    return x.reshape(-1, size, *x.shape[1:])
