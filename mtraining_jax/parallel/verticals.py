"""Key columns of a sparse index: fetched from their owners once, their gradients sent home.

A column is a handful of bytes and is wanted by every rank with later queries, so all columns
together are gathered once per layer instead of riding the ring with the diagonals.
"""

from jax import Array, lax

from mtraining_jax.parallel.layout import Layout
from pallas_kernels.index import VerticalSlashIndex
from pallas_kernels.tiles import gather_columns, pad_columns, scatter_columns


def gather_verticals(
    k: Array, v: Array, index: VerticalSlashIndex, layout: Layout, rank: Array | int,
    axis_names: tuple[str, ...],
) -> tuple[Array, Array]:
    """The columns of `index`, the same on every rank.

    Every rank contributes the columns that it owns and zeros elsewhere, so the sum over ranks
    has one term per element and is exact in any dtype.

    Args:
        k, v: [B, n, Hk, D], this rank's shard.
        index: the global index.
        layout: where tokens lie.
        rank: this rank.
        axis_names: mesh axes of the sequence, () for one device.

    Returns:
        keys, values [B, Mv, Hq, D] in the dtype of k; Mv as `pad_columns` gives it.
    """
    local = layout.local_positions(pad_columns(index), rank)
    columns = gather_columns(k, local), gather_columns(v, local)
    return lax.psum(columns, axis_names) if axis_names else columns


def return_vertical_gradients(
    dk: Array, dv: Array, dk_columns: Array, dv_columns: Array, index: VerticalSlashIndex,
    layout: Layout, rank: Array | int, axis_names: tuple[str, ...],
) -> tuple[Array, Array]:
    """Adds the gradients of columns, summed over the ranks, to the shards that own them.

    Args:
        dk, dv: fp32 [B, n, Hk, D], gradients of this rank's shard so far.
        dk_columns, dv_columns: fp32 [B, Mv, Hq, D], from the queries of this rank.
        index, layout, rank, axis_names: as in `gather_verticals`.

    Returns:
        dk, dv with the gradients of this rank's columns added.
    """
    columns = dk_columns, dv_columns
    dk_columns, dv_columns = lax.psum(columns, axis_names) if axis_names else columns
    local = layout.local_positions(pad_columns(index), rank)
    return scatter_columns(dk, dk_columns, local), scatter_columns(dv, dv_columns, local)


def has_verticals(index: VerticalSlashIndex | None) -> bool:
    """Whether the index has room for any vertical (static)."""
    return index is not None and index.vertical_tokens.shape[-1] > 0

