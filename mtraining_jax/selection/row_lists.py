"""Lists of key blocks for the rows of blocks of a rank."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.selection import collectives
from mtraining_jax.selection.context import SelectionContext
from pallas_kernels.fp8_scores import Fp8Keys
from pallas_kernels.index import BlockMaskIndex
from pallas_kernels.index import bits as sets

Keys = Array | Fp8Keys


def gathered(keys: Keys, context: SelectionContext) -> Keys:
    """Gathers the local keys [B, n, ...] of all ranks, in sequence order."""
    return jax.tree.map(lambda x: collectives.all_blocks(x, *context.shards), keys)


def index_in_parts(
    bits: Callable[[Array, Keys, SelectionContext], Array],
    q: Array,
    k: Keys,
    context: SelectionContext,
    block_size: int,
    count: int,
) -> BlockMaskIndex:
    """Builds the index of the local rows of blocks from the bits of `count` rows at a time."""
    num_local = context.block_ids.shape[0]

    def part(first: Array | int) -> Array:
        ids = lax.dynamic_slice_in_dim(context.block_ids, first, count)
        rows = lax.dynamic_slice_in_dim(q, first * block_size, count * block_size, 1)
        return bits(rows, k, dataclasses.replace(context, block_ids=ids))

    if count >= num_local:
        return BlockMaskIndex(part(0), context.num_blocks, block_size)

    def add(i: Array, found: Array) -> Array:
        # The last part starts early enough to end with the last row.
        first = jnp.minimum(i * count, num_local - count)
        return lax.dynamic_update_slice_in_dim(found, part(first), first, axis=2)

    words = sets.words_for(context.num_blocks)
    found = jnp.zeros((q.shape[0], q.shape[2], num_local, words), jnp.uint32)
    found = lax.fori_loop(0, -(-num_local // count), add, found)
    return BlockMaskIndex(found, context.num_blocks, block_size)
