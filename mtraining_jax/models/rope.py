"""Rotary positions, plain and with YaRN, exact enough for millions of tokens.

The angle of position p and frequency f is p * f. In one fp32 product it is wrong by up to
p * 2**-24 radians: 0.06 at a million tokens. Here p and f are split so that every large product
is exact, and the angle stays within 2e-4 radians up to 2**22 tokens.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from mtraining_jax.models.spec import ModelSpec

_LOW_BITS = 11  # p = high + low, low < 2**11; times 12 bits of f both products fit 24 bits.


def rope_frequencies(spec: ModelSpec) -> tuple[np.ndarray, float]:
    """Angles per token of each pair of dimensions.

    With YaRN, frequencies that turn more than `beta_fast` times over the original context are
    kept, those below `beta_slow` turns are divided by `factor`, and a linear ramp over the
    dimensions blends between (arXiv:2309.00071, section 3.2).

    Returns:
        Frequencies float64 [D/2] in radians per token, and the factor on cos and sin.
    """
    dim = spec.head_dim
    frequencies = spec.rope_theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies, 1.0

    original = scaling.original_max_position_embeddings or spec.max_position_embeddings

    def dimension_turning(rotations: float) -> float:
        """The (fractional) pair that turns `rotations` times over the original context."""
        turns_of_first = original / (2 * math.pi)
        return dim * math.log(turns_of_first / rotations) / (2 * math.log(spec.rope_theta))

    low, high = dimension_turning(scaling.beta_fast), dimension_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # A range without width is a step.
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    frequencies = frequencies * (1 - ramp) + frequencies / scaling.factor * ramp
    attention_factor = scaling.attention_factor
    if attention_factor is None:
        attention_factor = 0.1 * math.log(scaling.factor) + 1.0
    return frequencies, attention_factor


def rope_tables(positions: Array, spec: ModelSpec) -> tuple[Array, Array]:
    """Cosines and sines, both times the attention factor of YaRN.

    Args:
        positions: int32 [S] or [B, S], global token positions, in any order, below 2**22.
        spec: the model.

    Returns:
        cos and sin, fp32 [1 or B, S, 1, D/2], ready to broadcast over heads.
    """
    frequencies, factor = rope_frequencies(spec)
    mantissa, exponent = np.frexp(frequencies)
    head = np.ldexp(np.round(np.ldexp(mantissa, 12)), exponent - 12)
    tail = jnp.asarray(frequencies - head, jnp.float32)
    head = jnp.asarray(head, jnp.float32)

    positions = positions if positions.ndim == 2 else positions[None]
    positions = positions.astype(jnp.int32)[:, :, None, None]
    low = positions & ((1 << _LOW_BITS) - 1)
    far = (positions - low).astype(jnp.float32) * head
    near = low.astype(jnp.float32) * head + positions.astype(jnp.float32) * tail
    cos_far, sin_far, cos_near, sin_near = jnp.cos(far), jnp.sin(far), jnp.cos(near), jnp.sin(near)
    cos = cos_far * cos_near - sin_far * sin_near
    sin = sin_far * cos_near + cos_far * sin_near
    return cos * factor, sin * factor


def apply_rope(x_BSHD: Array, cos: Array, sin: Array) -> Array:
    """Turns dimension i against dimension i + D/2 (the Hugging Face order), computing in fp32.

    Args:
        x_BSHD: queries or keys [B, S, H, D].
        cos: fp32 [1 or B, S, 1, D/2], see `rope_tables`.
        sin: the same shape.

    Returns:
        An array of the shape and dtype of `x_BSHD`.
    """
    first, second = jnp.split(x_BSHD.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BSHD.dtype)
