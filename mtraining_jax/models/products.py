"""Matrix products that are exact for fp32 inputs; by default, GPUs use TF32."""

import jax.numpy as jnp
from jax import Array, lax


def dot(equation: str, a: Array, b: Array) -> Array:
    """An einsum in the dtype of `a`; an fp32 result and a cast would write twice the bytes."""
    return jnp.einsum(equation, a, b, precision=precision_of(a))


def dot32(equation: str, a: Array, b: Array) -> Array:
    """An einsum with an fp32 result."""
    return jnp.einsum(equation, a, b, precision=precision_of(a), preferred_element_type=jnp.float32)


def precision_of(a: Array) -> lax.Precision | None:
    """The precision at which a product is exact for inputs like `a`."""
    return lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
