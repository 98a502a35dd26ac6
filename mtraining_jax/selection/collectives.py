"""Exact collectives: nothing rounds, so results do not depend on the number of ranks."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.index import Index, Rows

AxisNames = Sequence[str]


def exact_sum(tree, axis_names: AxisNames):
    """Sums integers over ranks, or floats that are nonzero on a single rank only."""
    return lax.psum(tree, tuple(axis_names)) if axis_names else tree


def maximum(x: Array, axis_names: AxisNames) -> Array:
    """Takes the elementwise maximum over ranks."""
    return lax.pmax(x, tuple(axis_names)) if axis_names else x


def local_index(block_ids: Array, num_blocks: int) -> Array:
    """Returns the index of each block among `block_ids` (of ids below NB), or -1: int32 [NB]."""
    indices = jnp.arange(block_ids.shape[0], dtype=jnp.int32)
    return jnp.full(num_blocks, -1, jnp.int32).at[block_ids].set(indices, mode="drop")


def gather_rows(
    x_BnHD: Array, positions: Array, block_ids: Array, num_blocks: int, axis_names: AxisNames
) -> Array:
    """Gathers rows of a sequence-sharded array at global positions int32 [R], replicated."""
    block_size = x_BnHD.shape[1] // block_ids.shape[0]
    local = local_index(block_ids, num_blocks)[positions // block_size]
    rows = x_BnHD[:, jnp.maximum(local, 0) * block_size + positions % block_size]
    wide = rows.astype(jnp.promote_types(rows.dtype, jnp.float32))
    mine = jnp.where((local >= 0)[:, None, None], wide, 0)
    return exact_sum(mine, axis_names).astype(x_BnHD.dtype)


def rows_of(block_ids: Array, axis_names: AxisNames) -> Rows:
    """Returns the positions of rows of a `sharded_by_query` index, for reductions over all rows."""
    return Rows(block_ids, functools.partial(exact_sum, axis_names=axis_names))


def all_blocks(x_BnHD: Array, block_ids: Array, num_blocks: int, axis_names: AxisNames) -> Array:
    """Gathers the blocks of a sequence-sharded array: [B, S, H, D] in order, replicated."""
    if axis_names:
        axes = tuple(axis_names)
        block_ids = lax.all_gather(block_ids, axes, tiled=True)
        x_BnHD = lax.all_gather(x_BnHD, axes, axis=1, tiled=True)
    blocks = x_BnHD.reshape(x_BnHD.shape[0], num_blocks, -1, *x_BnHD.shape[2:])
    return blocks[:, local_index(block_ids, num_blocks)].reshape(x_BnHD.shape)


def all_rows(index: Index, block_ids: Array, num_blocks: int, axis_names: AxisNames) -> Index:
    """Gathers all rows of an index, in sequence order; replicated.

    Without `axis_names` all rows are local and in order.
    """
    if not index.sharded_by_query or not axis_names:
        return index
    axes = tuple(axis_names)
    order = local_index(lax.all_gather(block_ids, axes, tiled=True), num_blocks)
    return jax.tree.map(lambda x: lax.all_gather(x, axes, axis=2, tiled=True)[:, :, order], index)


def to_heads(
    parts: Sequence[Array], block_ids: Array, num_blocks: int, axis_names: AxisNames
) -> tuple[list[Array], Array]:
    """Redistributes sequence shards so that each rank has whole sequences of some heads.

    A single all-to-all. Work on single heads then needs no further communication and is split
    over the ranks. The `parts` are arrays [B, Hq, n/g, w] of 32-bit numbers, of the local blocks.

    Returns:
        Arrays [R, NB, w] with blocks in global order, where R = ceil(B*Hq / ranks) rows b*Hq + h
        start at r*R on rank r; and int32 [R], the head h of each row. If ranks do not divide B*Hq,
        the first rows are repeated after the last.
    """
    batch, heads, num_local = parts[0].shape[:3]
    rows = batch * heads
    ids = jnp.broadcast_to(block_ids[:, None], (batch, heads, num_local, 1))
    as_bits = [lax.bitcast_convert_type(x, jnp.int32) for x in (*parts, ids)]
    packed = jnp.concatenate(as_bits, axis=-1).reshape(rows, num_local, -1)
    row = jnp.arange(rows, dtype=jnp.int32)
    if axis_names:
        axes = tuple(axis_names)
        ranks = lax.axis_size(axes)
        share = -(-rows // ranks)
        packed = packed[np.arange(ranks * share) % rows]
        packed = lax.all_to_all(packed, axes, split_axis=0, concat_axis=1, tiled=True)
        row = lax.axis_index(axes) * share + jnp.arange(share, dtype=jnp.int32)
    packed = packed[:, local_index(packed[0, :, -1], num_blocks)]
    ends = np.cumsum([x.shape[-1] for x in parts]).tolist()
    whole = [
        lax.bitcast_convert_type(packed[..., end - x.shape[-1] : end], x.dtype)
        for x, end in zip(parts, ends, strict=True)
    ]
    return whole, row % heads


def entries_of(batch: int, heads: int, axis_names: AxisNames) -> Array:
    """Returns the batch entry of each row that `to_heads` assigns to this rank: int32 [R]."""
    rows = batch * heads
    row = jnp.arange(rows, dtype=jnp.int32)
    if axis_names:
        axes = tuple(axis_names)
        share = -(-rows // lax.axis_size(axes))
        row = lax.axis_index(axes) * share + jnp.arange(share, dtype=jnp.int32)
    return row % rows // heads


def from_heads(x: Array, batch: int, heads: int, axis_names: AxisNames) -> Array:
    """Gathers [R, T], results for the rows of `to_heads`: [B, Hq, T], replicated."""
    if axis_names:
        x = lax.all_gather(x, tuple(axis_names), axis=0, tiled=True)
    return x[: batch * heads].reshape(batch, heads, -1)
