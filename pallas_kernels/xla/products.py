"""Products and block operations shared by the passes of the XLA backend."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

ROWS_PER_CHUNK = 16  # bounds memory: chunk * g * g floats per head


def chunk_of(blocks: int) -> int:
    return math.gcd(blocks, ROWS_PER_CHUNK)


def map_starts(step: Callable[[Array], Any], stop: int, size: int) -> Any:
    """Stacks step(start) for start in 0, size, ... below `stop` along a new axis."""
    starts = np.arange(0, stop, size, dtype=np.int32)
    if starts.size == 1:
        return jax.tree.map(lambda x: x[None], step(jnp.int32(0)))
    return lax.map(step, starts)


def joined(chunks: Array) -> Array:
    """Joins the results of `map_starts`: [chunks, B, H, c, ...] to [B, H, chunks * c, ...]."""
    chunks = jnp.moveaxis(chunks, 0, 2)
    return chunks.reshape(*chunks.shape[:2], -1, *chunks.shape[4:])


def logits_of(q: Array, keys: Array, scale: float) -> Array:
    keys = jnp.broadcast_to(keys, (*q.shape[:3], *keys.shape[3:]))
    return scale * dot("bhiqd,bhikd->bhiqk", q, keys)


def dot(equation: str, a: Array, b: Array) -> Array:
    """Computes an einsum with fp32 accumulation; fp32 operands use fp32 products, not tf32."""
    dtype = jnp.promote_types(a.dtype, b.dtype)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return jnp.einsum(
        equation,
        a.astype(dtype),
        b.astype(dtype),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def finite(x: Array) -> Array:
    return jnp.where(x > -jnp.inf, x, 0.0)


def take_blocks(blocks: Array, numbers: Array, num_heads: int) -> Array:
    """Gathers blocks [B, Hk, n, ...] at in-range numbers [B, Hq, rows] -> [B, Hq, rows, ...]."""
    group = num_heads // blocks.shape[1]
    batch = np.arange(blocks.shape[0], dtype=np.int32)[:, None, None]
    heads = (np.arange(num_heads, dtype=np.int32) // group)[None, :, None]
    # The numbers are in bounds: nothing wraps around, and no result is masked.
    return blocks.at[batch, heads, numbers].get(
        mode="promise_in_bounds", wrap_negative_indices=False
    )


def to_blocks(x: Array, g: int) -> Array:
    """[B, S, H, D] -> [B, H, S/g, g, D]."""
    batch, _, heads, dim = x.shape
    return x.reshape(batch, -1, g, heads, dim).transpose(0, 3, 1, 2, 4)


def from_blocks(x: Array) -> Array:
    """[B, H, n, g, D] -> [B, S, H, D]."""
    batch, heads, _, _, dim = x.shape
    return x.transpose(0, 2, 3, 1, 4).reshape(batch, -1, heads, dim)


def slice_rows(x: Array, rows: Array) -> Array:
    """Slices the entries [B, Hq, rows, ...] of adjacent blocks of [B, Hq, n, ...]."""
    return slice_from(x, rows[0], rows.size, axis=2)


def slice_from(x: Array, start: Array, size: int, axis: int) -> Array:
    """Slices `size` adjacent entries along an axis; a negative start does not wrap around."""
    return lax.dynamic_slice_in_dim(x, start, size, axis, allow_negative_indices=False)


def entry(x: Array, number: Array | int, axis: int) -> Array:
    """Returns one entry along an axis, without the axis; a negative number does not wrap around."""
    return lax.dynamic_index_in_dim(x, number, axis, keepdims=False, allow_negative_indices=False)
