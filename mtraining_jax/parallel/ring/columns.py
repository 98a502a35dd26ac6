"""Key columns of a sparse index: all-reduced once per layer, gradients returned to their owners.

Columns are few and every rank with later queries needs them, so all of them are fetched in one
collective per layer instead of traveling around the ring with the keys.
"""

from jax import Array, lax

from pallas_kernels.tiles import gather_columns, scatter_columns

Pair = tuple[Array, Array]


def fetch_columns(kv: Pair, positions: Array, axis_names: tuple[str, ...]) -> Pair:
    """Fetches the columns of an index to every rank of the given axes.

    Each rank contributes its own columns and zeros elsewhere, so the sum is exact in any dtype.

    Args:
        kv: [B, n, Hk, D] each, this rank's keys and values.
        positions: int32 [B, Hq, Mv], local positions; outside [0, n) for columns of other ranks.
        axis_names: mesh axes that the keys and values are sharded over, () for none.

    Returns:
        keys, values [B, Mv, Hq, D] in the dtype of the keys.
    """
    columns = gather_columns(kv[0], positions), gather_columns(kv[1], positions)
    return lax.psum(columns, axis_names) if axis_names else columns


def return_column_gradients(
    dkv: Pair, columns: Pair, positions: Array, axis_names: tuple[str, ...]
) -> Pair:
    """Sums column gradients over mesh axes and adds those of local columns to (dk, dv).

    Args:
        dkv: fp32 [B, n, Hk, D] each.
        columns: fp32 [B, Mv, Hq, D] each, from this rank's queries.
        positions, axis_names: as in `fetch_columns`.
    """
    columns = lax.psum(columns, axis_names) if axis_names else columns
    dk, dv = (scatter_columns(x, y, positions) for x, y in zip(dkv, columns, strict=True))
    return dk, dv
