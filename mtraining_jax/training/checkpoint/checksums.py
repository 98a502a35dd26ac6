"""Checksums of arrays: compressed arrays with a changed byte may still decode to numbers."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def checksums(arrays: dict[str, Any]) -> dict[str, int]:
    """Computes a checksum of each array of a pytree of 32-bit arrays, by path.

    They depend on elements and their positions, not on the sharding.
    """
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(_all_checksums(arrays)))
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): int(number)
        for path, number in leaves
    }


@jax.jit
def _all_checksums(arrays: dict[str, Any]) -> dict[str, Any]:
    return jax.tree.map(_checksum, arrays)


def _checksum(x: Array) -> Array:
    """Sums bits * (2 * position + 1) over elements, mod 2^32: exact in any summation order."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    place = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        place = place * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)
