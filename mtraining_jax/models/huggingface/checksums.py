"""Checksums of parameters, whatever their sharding."""

import hashlib
import json
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.parallel.host_memory import to_device


def checksum(x: Array) -> Array:
    """Sums bits * (2 * position + 1), mod 2^32: exact in any order. Numbers have 16 or 32 bits."""
    bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
    place = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        place = place * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)


def digest(parameters: Mapping[str, Array], *, exact: bool = False) -> str:
    """Identifies parameters by name.

    Unless `exact`, they are equal if one is stored in bfloat16 and the other in fp32.
    """
    sums = (_exact if exact else _rounded)(dict(parameters))
    sums = {name: int(x) for name, x in jax.device_get(sums).items()}
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:16]


@jax.jit
def _exact(parameters: dict[str, Array]) -> dict[str, Array]:
    return jax.tree.map(checksum, parameters)


@jax.jit
def _rounded(parameters: dict[str, Array]) -> dict[str, Array]:
    bf16 = {"exponent_bits": 8, "mantissa_bits": 7}
    as_fp32 = jax.tree.map(lambda x: to_device(x).astype(jnp.float32), parameters)
    return jax.tree.map(lambda x: checksum(lax.reduce_precision(x, **bf16)), as_fp32)
