"""What a backward kernel call returns."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.tiles import Columns, scatter_columns


class Gradients(NamedTuple):
    """Gradients of one kernel call; None where the call had no such input.

    Attributes:
        dq: [B, nq, Hq, D], fp32 unless asked otherwise.
        dk, dv: [B, nk, Hk, D], summed over the query heads of a group; fp32 unless asked
            otherwise.
        dk_columns, dv_columns: fp32 [B, Mv, Hq, D]; None where dk and dv hold them.
    """

    dq: Array
    dk: Array | None
    dv: Array | None
    dk_columns: Array | None
    dv_columns: Array | None


def whole_keys(
    dk: Array, dv: Array, dk_columns: Array | None, dv_columns: Array | None,
    columns: Columns | None, dtype: jnp.dtype,
) -> tuple[Array, Array]:
    """dk and dv in a dtype, with the gradients of gathered columns added where they came from."""
    if columns is not None:
        dk = scatter_columns(dk, dk_columns, columns.tokens)
        dv = scatter_columns(dv, dv_columns, columns.tokens)
    return dk.astype(dtype), dv.astype(dtype)
