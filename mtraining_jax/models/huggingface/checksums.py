"""Checksums of parameters, whatever their sharding."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mtraining_jax.parallel.host_memory import to_device
from mtraining_jax.utils.random_bits import hash_uint32

CHECKSUM_VERSION = 2  # of checksums and digests in files


def checksum(x: Array) -> Array:
    """Sums hashes of bits and position, mod 2^32: exact in any order. Numbers have 16 or 32 bits.

    The hash is essential: a sum of products of bits and position, for example, does not change if
    all numbers are doubled, which adds 2^23 times the sum of all positions.
    """
    bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
    position = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        position = position * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.sum(_hash(bits, position), dtype=jnp.uint32)


def checksum_on_host(x: np.ndarray) -> np.uint32:
    """The checksum of an array in host memory."""
    bits = x.reshape(-1).view(f"uint{8 * x.dtype.itemsize}").astype(np.uint32)
    return np.sum(_hash(bits, np.arange(bits.size, dtype=np.uint32)), dtype=np.uint32)


def _hash(bits: Any, position: Any) -> Any:
    return hash_uint32(bits + position * np.uint32(0x9E3779B1))


def digest(parameters: Mapping[str, Array], *, exact: bool = False) -> str:
    """Identifies parameters by name.

    Unless `exact`, they are equal if one is stored in bfloat16 and the other in fp32. Digests with
    another first part, such as "v2-", are of another `CHECKSUM_VERSION` and cannot be compared.
    """
    sums = (_exact if exact else _rounded)(dict(parameters))
    sums = {name: int(x) for name, x in jax.device_get(sums).items()}
    found = hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:16]
    return f"v{CHECKSUM_VERSION}-{found}"


@jax.jit
def _exact(parameters: dict[str, Array]) -> dict[str, Array]:
    return jax.tree.map(checksum, parameters)


@jax.jit
def _rounded(parameters: dict[str, Array]) -> dict[str, Array]:
    bf16 = {"exponent_bits": 8, "mantissa_bits": 7}
    as_fp32 = jax.tree.map(lambda x: to_device(x).astype(jnp.float32), parameters)
    return jax.tree.map(lambda x: checksum(lax.reduce_precision(x, **bf16)), as_fp32)
