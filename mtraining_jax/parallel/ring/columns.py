"""Key columns of a sparse index: all-reduced once per layer, gradients returned to their owners.

Columns are few and every rank with later queries needs them, so all of them are fetched in one
collective per layer instead of traveling around the ring with the keys.
"""

from jax import Array, lax

from pallas_kernels.tiles import gather_columns, scatter_columns

Pair = tuple[Array, Array]


def fetch_columns(kv: Pair, positions: Array, axis_names: tuple[str, ...]) -> Pair:
    """Fetches the columns of an index to every rank of the given axes.

    Every rank contributes its own columns and zeros elsewhere. The sum over ranks has one nonzero
    term per element and is exact in any dtype.

    Args:
        kv: [B, n, Hk, D] each, this rank's keys and values.
        positions: int32 [B, Hq, Mv], local positions of the columns; outside [0, n) for columns
            of other ranks. Exactly one rank holds each column.
        axis_names: mesh axes that the keys and values are sharded over, () for none.

    Returns:
        keys, values [B, Mv, Hq, D] in the dtype of the keys.
    """
    columns = tuple(gather_columns(x, positions) for x in kv)
    return lax.psum(columns, axis_names) if axis_names else columns


def return_column_gradients(
    dkv: Pair, columns: Pair, positions: Array, axis_names: tuple[str, ...]
) -> Pair:
    """Sums column gradients over mesh axes and adds them to the gradients of keys and values.

    Args:
        dkv: fp32 [B, n, Hk, D] each, gradients of this rank's keys and values.
        columns: fp32 [B, Mv, Hq, D] each, column gradients from this rank's queries.
        positions: as in `fetch_columns`.
        axis_names: as in `fetch_columns`.

    Returns:
        dk, dv including the gradients of the local columns.
    """
    columns = lax.psum(columns, axis_names) if axis_names else columns
    return tuple(scatter_columns(x, y, positions) for x, y in zip(dkv, columns, strict=True))
