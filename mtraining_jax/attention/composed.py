"""Attention over an index that cannot be expressed as tiles, on the shards of a sequence."""

import functools
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array

from mtraining_jax.selection import collectives
from mtraining_jax.selection.context import SelectionContext
from pallas_kernels.composed import chunk_attention
from pallas_kernels.index import TokenChunksIndex


def composed_ring(
    ring: functools.partial,
    q: Array,
    k: Array,
    v: Array,
    index: TokenChunksIndex,
    context: SelectionContext,
) -> tuple[Array, Array]:
    """Attention of one rank's queries to selected chunks of all keys; differentiable.

    The query's own chunk is covered by `ring`, a `ring_attention` with all arguments after the
    index and `return_lse`. For past chunks, the keys and values of all ranks are gathered, across
    nodes too. The result is out [B, n, Hq, D] in the dtype of q, and lse fp32 [B, Hq, n].
    """
    own = ring(q, k, v, index.own(context.block_ids))
    where = context.num_blocks, context.axis_names
    keys, values = (cast(Array, _all_blocks(*where, x, context.block_ids)) for x in (k, v))
    return chunk_attention(
        q,
        keys,
        values,
        index,
        context.block_ids,
        own,
        scale=ring.keywords["scale"],
        backend=ring.keywords["backend"],
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _all_blocks(
    num_blocks: int, axis_names: tuple[str, ...], x_BnHD: Array, block_ids: Array
) -> Array:
    """`collectives.all_blocks`, with gradients of the ranks summed in fp32."""
    return collectives.all_blocks(x_BnHD, block_ids, num_blocks, axis_names)


def _all_blocks_forward(
    num_blocks: int, axis_names: tuple[str, ...], x_BnHD: Array, block_ids: Array
) -> tuple[Array, Array]:
    return collectives.all_blocks(x_BnHD, block_ids, num_blocks, axis_names), block_ids


def _all_blocks_backward(
    num_blocks: int, axis_names: tuple[str, ...], block_ids: Array, d_all: Array
) -> tuple[Array, None]:
    batch, seq_len, *heads = d_all.shape
    local_tokens = block_ids.size * seq_len // num_blocks
    local = jax.ShapeDtypeStruct((batch, local_tokens, *heads), jnp.float32)
    gather: Callable[[Array], Array] = functools.partial(
        collectives.all_blocks, block_ids=block_ids, num_blocks=num_blocks, axis_names=axis_names
    )
    (d_local,) = jax.linear_transpose(gather, local)(d_all.astype(jnp.float32))
    return d_local.astype(d_all.dtype), None


_all_blocks.defvjp(_all_blocks_forward, _all_blocks_backward)
