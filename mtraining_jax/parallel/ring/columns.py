"""Key columns of a sparse index: fetched from their owners once, their gradients sent home.

A column is a handful of bytes and is wanted by every rank with later queries, so all columns
together are gathered once per layer instead of riding the ring with the diagonals.
"""

from jax import Array, lax

from pallas_kernels.index import VerticalSlashIndex
from pallas_kernels.tiles import gather_columns, scatter_columns


def gather_verticals(
    k: Array, v: Array, positions: Array, axis_names: tuple[str, ...]
) -> tuple[Array, Array]:
    """The columns of an index, the same on every rank of some axes.

    Every rank contributes the columns that it owns and zeros elsewhere, so the sum over ranks
    has one term per element and is exact in any dtype.

    Args:
        k, v: [B, n, Hk, D], the keys and values that this rank holds.
        positions: int32 [B, Hq, Mv], where the columns lie among them; outside [0, n) if they
            are held elsewhere. Every column is held at one place of the axes.
        axis_names: mesh axes over which the keys and values are spread, () if all are here.

    Returns:
        keys, values [B, Mv, Hq, D] in the dtype of k.
    """
    columns = gather_columns(k, positions), gather_columns(v, positions)
    return lax.psum(columns, axis_names) if axis_names else columns


def return_vertical_gradients(
    dk: Array, dv: Array, dk_columns: Array, dv_columns: Array, positions: Array,
    axis_names: tuple[str, ...],
) -> tuple[Array, Array]:
    """Adds the gradients of columns, summed over some axes, to the keys and values they are of.

    Args:
        dk, dv: fp32 [B, n, Hk, D], gradients of the keys and values that this rank holds.
        dk_columns, dv_columns: fp32 [B, Mv, Hq, D], from the queries of this rank.
        positions, axis_names: as in `gather_verticals`.

    Returns:
        dk, dv with the gradients of the columns among them added.
    """
    columns = dk_columns, dv_columns
    dk_columns, dv_columns = lax.psum(columns, axis_names) if axis_names else columns
    return scatter_columns(dk, dk_columns, positions), scatter_columns(dv, dv_columns, positions)


def has_verticals(index: VerticalSlashIndex | None) -> bool:
    """Whether the index has room for any vertical (static)."""
    return index is not None and index.vertical_tokens.shape[-1] > 0
