"""Checksums of parameters, whatever their sharding."""

import functools
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

CHECKSUM_VERSION = 2  # of checksums and digests in files; version 1 can still be verified


def checksum(x: Array, version: int = CHECKSUM_VERSION) -> Array:
    """Sums hashes of bits and position, mod 2^32: exact in any order. Numbers have 16 or 32 bits.

    The hash is essential: version 1, a sum of products of bits and position, often did not change
    if all numbers were doubled, which adds 2^23 times a sum of positions.
    """
    bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
    position = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        position = position * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.sum(_term(bits, position, version), dtype=jnp.uint32)


def checksum_on_host(x: np.ndarray, version: int = CHECKSUM_VERSION) -> np.uint32:
    """The checksum of an array in host memory."""
    bits = x.reshape(-1).view(f"uint{8 * x.dtype.itemsize}").astype(np.uint32)
    position = np.arange(bits.size, dtype=np.uint32)
    return np.sum(_term(bits, position, version), dtype=np.uint32)


def _term(bits: Any, position: Any, version: int) -> Any:
    if version == 1:
        return bits * (2 * position + 1)
    return hash_uint32(bits + position * np.uint32(0x9E3779B1))


def digest(
    parameters: Mapping[str, Array], *, exact: bool = False, version: int = CHECKSUM_VERSION
) -> str:
    """Identifies parameters by name.

    Unless `exact`, they are equal if one is stored in bfloat16 and the other in fp32. Digests begin
    with their version, such as "v2-"; those of version 1 do not.
    """
    sums = (_exact if exact else _rounded)(dict(parameters), version)
    sums = {name: int(x) for name, x in jax.device_get(sums).items()}
    found = hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:16]
    return found if version == 1 else f"v{version}-{found}"


def digest_like(parameters: Mapping[str, Array], known: str) -> str:
    """The digest that can be compared with a known one: by its version, if that is known here."""
    return digest(parameters, version=CHECKSUM_VERSION if "-" in known else 1)


@functools.partial(jax.jit, static_argnums=1)
def _exact(parameters: dict[str, Array], version: int) -> dict[str, Array]:
    return jax.tree.map(lambda x: checksum(x, version), parameters)


@functools.partial(jax.jit, static_argnums=1)
def _rounded(parameters: dict[str, Array], version: int) -> dict[str, Array]:
    bf16 = {"exponent_bits": 8, "mantissa_bits": 7}
    as_fp32 = jax.tree.map(lambda x: to_device(x).astype(jnp.float32), parameters)
    return jax.tree.map(lambda x: checksum(lax.reduce_precision(x, **bf16), version), as_fp32)
