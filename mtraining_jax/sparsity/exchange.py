"""Exact exchanges between ranks: nothing here rounds, so nothing depends on the rank count."""

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

AxisNames = Sequence[str]


def exact_sum(tree, axis_names: AxisNames):
    """Sum over ranks of integers, or of floats of which one rank alone holds a non-zero."""
    return lax.psum(tree, tuple(axis_names)) if axis_names else tree


def maximum(x: Array, axis_names: AxisNames) -> Array:
    """Elementwise maximum over ranks."""
    return lax.pmax(x, tuple(axis_names)) if axis_names else x


def block_table(values: Array, block_ids: Array, num_blocks: int) -> Array:
    """Places values [..., n/g] of the local blocks in a table [..., NB], zero elsewhere.

    Ids outside 0 .. NB-1 are dropped. `exact_sum` of the tables of all ranks is the whole table.
    """
    table = jnp.zeros((*values.shape[:-1], num_blocks), values.dtype)
    return table.at[..., block_ids].set(values, mode="drop")


def local_index(block_ids: Array, num_blocks: int) -> Array:
    """int32 [NB + 1]: where block b sits among `block_ids`, or -1; the last entry is -1."""
    places = jnp.arange(1, block_ids.shape[0] + 1, dtype=jnp.int32)
    return block_table(places, block_ids, num_blocks + 1) - 1


def gather_rows(
    x_BnHD: Array, positions: Array, block_ids: Array, num_blocks: int, axis_names: AxisNames
) -> Array:
    """Rows of a sequence-sharded array at global positions, replicated on every rank.

    Args:
        x_BnHD: [B, n, H, D], the local blocks.
        positions: int32 [R], global token positions.
        block_ids: int32 [n/g], global number of each local block.
        num_blocks: NB, blocks of the whole sequence.
        axis_names: mesh axes the sequence is sharded over.

    Returns:
        [B, R, H, D] in the dtype of x.
    """
    block_size = x_BnHD.shape[1] // block_ids.shape[0]
    local = local_index(block_ids, num_blocks)[positions // block_size]
    rows = x_BnHD[:, jnp.maximum(local, 0) * block_size + positions % block_size]
    wide = rows.astype(jnp.promote_types(rows.dtype, jnp.float32))
    mine = jnp.where((local >= 0)[:, None, None], wide, 0)
    return exact_sum(mine, axis_names).astype(x_BnHD.dtype)


def from_previous_block(
    tails: Array, block_ids: Array, num_blocks: int, axis_names: AxisNames
) -> Array:
    """What the block before each local block (in global order) has to hand on.

    The block before a local block must live on this rank, on the rank before or after it, or on
    the rank before it when ranks are numbered device-major (device * N + node); all cyclically.
    That holds for every layout of this package, and keeps the traffic at a few shifts of the
    local tails instead of a gather of everybody's.

    Args:
        tails: [B, H, n/g, T], of each local block.
        block_ids: int32 [n/g].
        num_blocks: NB.
        axis_names: mesh axes the sequence is sharded over.

    Returns:
        [B, H, n/g, T]; zeros for global block 0.
    """
    sources = [(tails, block_ids)]
    if axis_names:
        axes = tuple(axis_names)
        for shift in _shifts([lax.axis_size(axis) for axis in axes]):
            sources.append(lax.ppermute((tails, block_ids), axes, shift))
    tails = jnp.concatenate([tail for tail, _ in sources], axis=2)
    owned = jnp.concatenate([ids for _, ids in sources])
    # Entry b + 1 of the table tells where the tail of block b is. A block that came twice, from
    # the same rank by two shifts, brought the same tail twice.
    source = local_index(owned + 1, num_blocks + 1)[block_ids]
    return jnp.where((source >= 0)[:, None], tails[:, :, jnp.maximum(source, 0)], 0)


def _shifts(axis_sizes: Sequence[int]) -> list[tuple[tuple[int, int], ...]]:
    """Permutations (source, destination) of the ranks that `from_previous_block` names."""
    ranks = np.arange(math.prod(axis_sizes)).reshape(axis_sizes)
    row_major = ranks.reshape(-1).tolist()
    device_major = ranks.T.reshape(-1).tolist()
    orders = [row_major, row_major[::-1], device_major]
    shifts = [tuple(sorted(zip(order, order[1:] + order[:1], strict=True))) for order in orders]
    identity = tuple((rank, rank) for rank in row_major)
    return [shift for shift in dict.fromkeys(shifts) if shift != identity]
