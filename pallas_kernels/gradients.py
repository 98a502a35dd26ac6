"""Results of a backward kernel call."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.tiles import Columns, scatter_columns


class Gradients(NamedTuple):
    """Gradients of one kernel call; None for inputs that the call did not have."""

    dq: Array  # [B, nq, Hq, D], fp32 by default
    dk: Array | None  # [B, nk, Hk, D], summed over the query heads of a group; fp32 by default
    dv: Array | None
    dk_columns: Array | None  # fp32 [B, Mv, Hq, D]; None if included in dk
    dv_columns: Array | None


def whole_keys(grads: Gradients, columns: Columns | None, dtype: jnp.dtype) -> Gradients:
    """Adds the gradients of gathered columns to dk and dv, and converts these to a dtype."""
    _, dk, dv, dk_columns, dv_columns = grads
    assert dk is not None and dv is not None, "without tiles there are no dk and dv"
    if columns is not None:
        assert dk_columns is not None and dv_columns is not None
        dk = scatter_columns(dk, dk_columns, columns.tokens)
        dv = scatter_columns(dv, dv_columns, columns.tokens)
    return Gradients(grads.dq, dk.astype(dtype), dv.astype(dtype), None, None)
