"""Checksums of arrays: a changed byte in a compressed array would otherwise be read as numbers."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def checksums(arrays: dict[str, Any]) -> dict[str, int]:
    """One number for each array of a tree.

    Args:
        arrays: a pytree of arrays with elements of 32 bits.

    Returns:
        By the array's path. A number depends on the elements and their places, not on the
        sharding.
    """
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    numbers = jax.device_get(_all_checksums([leaf for _, leaf in leaves]))
    names = (jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves)
    return {name: int(number) for name, number in zip(names, numbers, strict=True)}


@jax.jit
def _all_checksums(arrays: list[Array]) -> list[Array]:
    return [_checksum(x) for x in arrays]


def _checksum(x: Array) -> Array:
    """Sum over elements of bits * (2 * place + 1), mod 2^32: exact in any order of summing."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    place = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        place = place * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)
