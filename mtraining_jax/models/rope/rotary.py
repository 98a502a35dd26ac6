"""Rotary position embeddings (RoPE), exact enough for millions of tokens.

An fp32 product of position p and frequency f has an error of up to p * 2**-24 radians: 0.06 at a
million tokens. Here both are split so that every large product is exact: at most 2e-4 radians up
to 2**23 tokens.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from mtraining_jax.models.rope.kind import Scaled
from mtraining_jax.models.spec import ModelSpec

_LOW_BITS = (
    11  # p = high + low, low < 2**11, high / 2**11 < 2**12: with 12 bits of f, products fit 24.
)


def rope_tables(
    positions: Array, spec: ModelSpec, length: int | Array | None = None
) -> tuple[Array, Array]:
    """Computes cosines and sines, fp32 [1 or B, S, 1, D/2], times the factor of the scaling.

    `positions`, int32 [S] or [B, S], are global and below 2**23. `length` is the sequence length,
    for scalings that depend on it: S if None, or int32 [B, S], that of each token's document.
    """
    length = positions.shape[-1] if length is None else length
    switch = None if spec.rope_scaling is None else spec.rope_scaling.switches_at
    if switch is None or isinstance(length, int):
        # Without a switch the length has no effect.
        (head, tail), factor = _split_frequencies(spec, length if isinstance(length, int) else 1)
    else:
        # The factor on cosines and sines is the same for both.
        short, factor = _split_frequencies(spec, switch)
        long, _ = _split_frequencies(spec, switch + 1)
        longer = (length > switch)[:, :, None, None]
        head, tail = (jnp.where(longer, x, y) for x, y in zip(long, short, strict=True))

    positions = positions if positions.ndim == 2 else positions[None]
    positions = positions.astype(jnp.int32)[:, :, None, None]
    low = positions & ((1 << _LOW_BITS) - 1)
    far = (positions - low).astype(jnp.float32) * head
    near = low.astype(jnp.float32) * head + positions.astype(jnp.float32) * tail
    cos_far, sin_far, cos_near, sin_near = jnp.cos(far), jnp.sin(far), jnp.cos(near), jnp.sin(near)
    cos = cos_far * cos_near - sin_far * sin_near
    sin = sin_far * cos_near + cos_far * sin_near
    return cos * factor, sin * factor


def rope_frequencies(spec: ModelSpec, length: int) -> Scaled:
    """Frequencies, float64 [D/2] in radians per token, and the factor on cosines and sines."""
    dimensions = np.arange(0, spec.head_dim, 2, dtype=np.float64)
    plain = spec.rope_theta ** -(dimensions / spec.head_dim)
    if spec.rope_scaling is None:
        return plain, 1.0
    return spec.rope_scaling.stretch(plain, spec.rope_theta, spec.max_position_embeddings, length)


def _split_frequencies(spec: ModelSpec, length: int) -> tuple[tuple[Array, Array], float]:
    """Returns frequencies as the sum of two fp32 [D/2], the first with 12 bits, and the factor."""
    frequencies, factor = rope_frequencies(spec, length)
    mantissa, exponent = np.frexp(frequencies)
    head = np.ldexp(np.round(np.ldexp(mantissa, 12)), exponent - 12)
    tail = jnp.asarray(frequencies - head, jnp.float32)
    return (jnp.asarray(head, jnp.float32), tail), factor


def apply_rope(x_BSHD: Array, cos: Array, sin: Array) -> Array:
    """Rotates dimension i against i + D/2 (the Hugging Face order), in fp32."""
    first, second = jnp.split(x_BSHD.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BSHD.dtype)
