"""Products with a projection, with or without a LoRA adapter, and their gradients."""

import zlib
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jax import Array

from mtraining_jax.models.lora.adapters import LoraSpec
from mtraining_jax.models.products import dot, dot32
from mtraining_jax.utils.random_bits import hash_uint32

_SEED_BITS = 24  # integers that fp32 represents exactly


class Projection(NamedTuple):
    """The parameters of y = x W^T, or with an adapter of y = x W^T + s (x A^T) B^T."""

    weight: Any  # W [O, I]; as a gradient, None if it is frozen
    lora_A: Any = None  # [R, I], or None without an adapter
    lora_B: Any = None  # [O, R]

    @property
    def wide(self) -> Array:
        """[W, B], or W without an adapter."""
        if self.lora_B is None:
            return self.weight
        return jnp.concatenate([self.weight, self.lora_B], axis=-1)

    def trained(self, lora: LoraSpec | None) -> Self:
        return self if lora is None else self._replace(weight=None)


class Dropout(NamedTuple):
    """Drops inputs of adapters. A mask depends only on the seed of its token and on names."""

    seeds: Array  # fp32 [...], integers, one per token

    @classmethod
    def of_layer(cls, seeds: Array, layer: Array) -> "Dropout":
        """Derives the seeds of a layer, int32, from those of a step."""
        bits = hash_uint32(seeds.astype(jnp.uint32) + (layer.astype(jnp.uint32) << _SEED_BITS))
        return cls(seeds_from(bits))

    def __call__(self, x: Array, rate: float, name: str) -> Array:
        """Zeroes entries of x [..., I] with probability `rate` and scales the others."""
        salt = np.uint32(zlib.crc32(name.encode()))
        columns = hash_uint32(jnp.arange(x.shape[-1], dtype=jnp.uint32) ^ salt)
        bits = hash_uint32(self.seeds.astype(jnp.uint32)[..., None] ^ columns)
        kept = bits >= np.uint32(round(rate * 2**32))
        return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


def seeds_from(bits: Array) -> Array:
    """Seeds, fp32, from uint32 random numbers."""
    return (bits >> (32 - _SEED_BITS)).astype(jnp.float32)


def widened(x: Array, low: Array | None) -> Array:
    """[x, low], or x without an adapter."""
    return x if low is None else jnp.concatenate([x, low], axis=-1)


class Projector(NamedTuple):
    """Computes with projections of one kind: trained ones, or with adapters of `lora`.

    `low` is s x A^T, [..., R], and `d_low` its gradient; both are None without an adapter.

    With more outputs than inputs, a second pass over y would take as long as a fifth of its
    product. So y is one product of [x, low] and `Projection.wide`, [W, B]; its gradient has d_low.
    """

    lora: LoraSpec | None = None
    dropout: Dropout | None = None

    def __call__(self, x: Array, of: Projection, name: str) -> Array:
        """Projects x [..., I] to y [..., O], in the dtype of x; `name` is that of the target."""
        y, low = dot("...i,oi->...o", x, of.weight), self.low(x, of, name)
        return y if low is None else y + dot("...r,or->...o", low, of.lora_B)

    def low(self, x: Array, of: Projection, name: str) -> Array | None:
        if of.lora_A is None:
            return None
        return self._scaled(dot32("...i,ri->...r", self._dropped(x, name), of.lora_A), x.dtype)

    def d_low(self, d_y: Array, of: Projection) -> Array | None:
        if of.lora_B is None:
            return None
        return self._scaled(dot32("co,or->cr", d_y, of.lora_B), d_y.dtype)

    def split(self, d_wide: Array, of: Projection) -> tuple[Array, Array | None]:
        """Splits the fp32 gradient of [x, low] into its parts."""
        if of.lora_B is None:
            return d_wide, None
        d_x, d_low = jnp.split(d_wide, [of.weight.shape[1]], axis=-1)
        return d_x, self._scaled(d_low, of.lora_B.dtype)

    def gradients(
        self, x: Array, low: Array | None, d_y: Array, d_low: Array | None, name: str
    ) -> Projection:
        """The fp32 gradients of the trained parameters, for x [C, I] and d_y [C, O]."""
        if self.lora is None:
            return Projection(dot32("co,ci->oi", d_y, x))
        if low is None or d_low is None:
            return Projection(None)
        d_A = dot32("cr,ci->ri", d_low, self._dropped(x, name))
        return Projection(None, d_A, dot32("co,cr->or", d_y, low))

    def through_A(self, d_x: Array, d_low: Array | None, of: Projection, name: str) -> Array:
        """Adds the gradient of x through its adapter, fp32."""
        if d_low is None:
            return d_x
        return d_x + self._dropped(dot32("cr,ri->ci", d_low, of.lora_A), name)

    def transposed(self, d_y: Array, d_low: Array | None, of: Projection, name: str) -> Array:
        """The gradient of x [C, I] for d_y [C, O], in the dtype of d_y."""
        if d_low is not None and self.dropout is None:
            weight = jnp.concatenate([of.weight, of.lora_A])
            return dot("co,oi->ci", widened(d_y, d_low), weight)
        d_x = dot("co,oi->ci", d_y, of.weight)
        return self.through_A(d_x, d_low, of, name).astype(d_y.dtype)

    def _scaled(self, low: Array, dtype: jnp.dtype) -> Array:
        assert self.lora is not None
        return (low * self.lora.scale).astype(dtype)

    def _dropped(self, x: Array, name: str) -> Array:
        if self.lora is None or self.dropout is None:
            return x
        return self.dropout(x, self.lora.dropout, name)
