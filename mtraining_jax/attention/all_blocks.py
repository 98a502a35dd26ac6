"""Keys and values of all ranks, for attention in several passes."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from mtraining_jax.selection import collectives


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def all_blocks(
    num_blocks: int, axis_names: tuple[str, ...], x_BnHD: Array, block_ids: Array
) -> Array:
    """`collectives.all_blocks`, with gradients of the ranks summed in fp32."""
    return collectives.all_blocks(x_BnHD, block_ids, num_blocks, axis_names)


def _forward(
    num_blocks: int, axis_names: tuple[str, ...], x_BnHD: Array, block_ids: Array
) -> tuple[Array, Array]:
    return all_blocks(num_blocks, axis_names, x_BnHD, block_ids), block_ids


def _backward(
    num_blocks: int, axis_names: tuple[str, ...], block_ids: Array, d_all: Array
) -> tuple[Array, None]:
    batch, seq_len, *heads = d_all.shape
    local_tokens = block_ids.size * seq_len // num_blocks
    local = jax.ShapeDtypeStruct((batch, local_tokens, *heads), jnp.float32)
    (d_local,) = jax.linear_transpose(
        lambda x: collectives.all_blocks(x, block_ids, num_blocks, axis_names), local
    )(d_all.astype(jnp.float32))
    return d_local.astype(d_all.dtype), None


all_blocks.defvjp(_forward, _backward)
