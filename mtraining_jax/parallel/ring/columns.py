"""Key columns of a sparse index: fetched from their owners once, gradients returned to them.

A column is a handful of bytes and is needed by every rank with later queries, so all columns
together are gathered once per layer instead of going round the ring with the keys.
"""

from jax import Array, lax

from pallas_kernels.tiles import gather_columns, scatter_columns

Pair = tuple[Array, Array]


def fetch_columns(kv: Pair, positions: Array, axis_names: tuple[str, ...]) -> Pair:
    """The columns of an index, the same on every rank of some axes.

    Every rank contributes the columns that it owns and zeros elsewhere, so the sum over ranks
    has one term per element and is exact in any dtype.

    Args:
        kv: [B, n, Hk, D] twice, the keys and values that this rank holds.
        positions: int32 [B, Hq, Mv], where the columns lie among them; outside [0, n) if they
            are held elsewhere. Every column is held at one place of the axes.
        axis_names: mesh axes over which the keys and values are spread, () if all are here.

    Returns:
        keys, values [B, Mv, Hq, D] in the dtype of the keys.
    """
    columns = tuple(gather_columns(x, positions) for x in kv)
    return lax.psum(columns, axis_names) if axis_names else columns


def return_column_gradients(
    dkv: Pair, columns: Pair, positions: Array, axis_names: tuple[str, ...]
) -> Pair:
    """Adds the gradients of columns, summed over some axes, to the keys and values they are of.

    Args:
        dkv: fp32 [B, n, Hk, D] twice, gradients of the keys and values that this rank holds.
        columns: fp32 [B, Mv, Hq, D] twice, from the queries of this rank.
        positions: as in `fetch_columns`.
        axis_names: as in `fetch_columns`.

    Returns:
        dk, dv with the gradients of the columns among them added.
    """
    columns = lax.psum(columns, axis_names) if axis_names else columns
    return tuple(scatter_columns(x, y, positions) for x, y in zip(dkv, columns, strict=True))
