"""What all GPU kernels support."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

Shaped = Array | jax.ShapeDtypeStruct  # where only shape and dtype are read

HEAD_DIMS = (64, 128, 192, 256)  # of the Hopper kernels
NARROW_HEAD_DIMS = HEAD_DIMS[:2]  # of the Triton kernels, and of Hopper's for 8-bit keys
_DTYPES = (jnp.bfloat16, jnp.float16)
BLOCK_SIZE = 128


def unsupported_operands(
    q: Shaped, block_size: int | None, head_dims: Sequence[int] = HEAD_DIMS
) -> str | None:
    """Implements the part of `Backend.unsupported` that all GPU kernels share."""
    if jnp.dtype(q.dtype) not in [jnp.dtype(d) for d in _DTYPES]:
        return f"dtype {q.dtype} (must be bfloat16 or float16)"
    if q.shape[-1] not in head_dims:
        *others, last = head_dims
        allowed = ", ".join(map(str, others))
        return f"head dim {q.shape[-1]} (must be {allowed} or {last})"
    if block_size not in (None, BLOCK_SIZE):
        return f"block_size {block_size} (must be 128)"
    return None
