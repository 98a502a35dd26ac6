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
        """[W, B], for the widened form of x."""
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


class Projector(NamedTuple):
    """Computes with projections of one kind: trained ones, or with adapters of `lora`."""

    lora: LoraSpec | None = None
    dropout: Dropout | None = None

    def __call__(self, x: Array, of: Projection, name: str) -> Array:
        """Projects x [..., I] to y [..., O], in the dtype of x; `name` is that of the target."""
        y = dot("...i,oi->...o", x, of.weight)
        if of.lora_B is None:
            return y
        return y + dot("...r,or->...o", self._low(x, of, name), of.lora_B)

    # With more outputs than inputs, a second pass over y would take as long as a fifth of its
    # product. So y is one product of [x, s x A^T] and [W, B], and d_x is part of its gradient.

    def widened(self, x: Array, of: Projection, name: str) -> Array:
        """Returns [x, s x A^T], [C, I + R]; x without an adapter."""
        if of.lora_B is None:
            return x
        return jnp.concatenate([x, self._low(x, of, name)], axis=-1)

    def narrowed(self, d_wide: Array, of: Projection, name: str) -> Array:
        """Returns the gradient of x [C, I] from that of its widened form, fp32 both."""
        if of.lora_B is None:
            return d_wide
        d_x, d_low = jnp.split(d_wide, [of.weight.shape[1]], axis=-1)
        d_low = self._scaled(d_low, of.lora_A)
        return d_x + self._dropped(dot32("cr,ri->ci", d_low, of.lora_A), name)

    def wide_gradients(
        self, wide: Array, d_y: Array, d_wide: Array, of: Projection, name: str
    ) -> Projection:
        """The same as `gradients`, from the widened form of x and its fp32 gradient."""
        if of.lora_B is None:
            return self.gradients(wide, d_y, of, name)
        x, low = jnp.split(wide, [of.weight.shape[1]], axis=-1)
        d_low = self._scaled(d_wide[:, x.shape[1] :], x)
        d_A = dot32("cr,ci->ri", d_low, self._dropped(x, name))
        return Projection(None, d_A, dot32("co,cr->or", d_y, low))

    def gradients(self, x: Array, d_y: Array, of: Projection, name: str) -> Projection:
        """The fp32 gradients of the trained parameters, for x [C, I] and d_y [C, O]."""
        if self.lora is None:
            return Projection(dot32("co,ci->oi", d_y, x))
        if of.lora_B is None:
            return Projection(None)
        d_A = dot32("cr,ci->ri", self._d_low(d_y, of), self._dropped(x, name))
        return Projection(None, d_A, dot32("co,cr->or", d_y, self._low(x, of, name)))

    def transposed(self, d_y: Array, of: Projection, name: str) -> Array:
        """The gradient of x [C, I] for d_y [C, O], in the dtype of d_y."""
        if of.lora_B is None:
            return dot("co,oi->ci", d_y, of.weight)
        d_low = self._d_low(d_y, of)
        if self.dropout is None:
            wide = jnp.concatenate([d_y, d_low], axis=-1)
            return dot("co,oi->ci", wide, jnp.concatenate([of.weight, of.lora_A]))
        d_x = dot("co,oi->ci", d_y, of.weight)
        return d_x + self._dropped(dot("cr,ri->ci", d_low, of.lora_A), name)

    def _low(self, x: Array, of: Projection, name: str) -> Array:
        return self._scaled(dot32("...i,ri->...r", self._dropped(x, name), of.lora_A), x)

    def _d_low(self, d_y: Array, of: Projection) -> Array:
        return self._scaled(dot32("co,or->cr", d_y, of.lora_B), d_y)

    def _scaled(self, low: Array, like: Array) -> Array:
        assert self.lora is not None
        return (low * self.lora.scale).astype(like.dtype)

    def _dropped(self, x: Array, name: str) -> Array:
        if self.lora is None or self.dropout is None:
            return x
        return self.dropout(x, self.lora.dropout, name)
