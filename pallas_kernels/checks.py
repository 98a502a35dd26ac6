"""Shape checks of kernel calls, before tracing."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.tiles import Columns, Tiles

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


def check_plan(q: Shaped, k: Shaped, tiles: Tiles | None, columns: Columns | None) -> int:
    """Checks the arguments of `plan`, raising ValueError; returns the block size."""
    for name, x in (("q", q), ("k", k)):
        if len(x.shape) != 4:
            raise ValueError(f"{name} has shape {x.shape}; expected [batch, tokens, heads, dim]")
        if 0 in x.shape:
            raise ValueError(f"{name} has shape {x.shape}; empty axes are not supported")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q has shape {q.shape} and k {k.shape}; batch and head dim must be equal")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q has {q.shape[2]} heads and k has {k.shape[2]}; the number of query heads must be a "
            "multiple of the number of key/value heads"
        )
    blocks = columns if tiles is None else tiles
    if blocks is None:
        raise ValueError("there is nothing to compute: pass tiles, columns or both")
    g = blocks.block_size
    for name, x in (("q", q), ("k", k)):
        if x.shape[1] % g:
            raise ValueError(
                f"{name} has {x.shape[1]} tokens; expected a multiple of block_size={g}"
            )
    (batch, num_queries, heads, _), num_keys = q.shape, k.shape[1]
    if tiles is not None:
        tiles.check(batch, heads, num_queries // g, num_keys // g)
    if columns is not None:
        if columns.block_size != g:
            raise ValueError(
                f"columns.block_size={columns.block_size} differs from the tiles' block_size={g}"
            )
        columns.check(batch, heads, num_queries // g)
    return g
