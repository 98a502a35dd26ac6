"""What a backward kernel call returns."""

from typing import NamedTuple

from jax import Array


class Gradients(NamedTuple):
    """Gradients of one kernel call; None where the call had no such input.

    Attributes:
        dq: [B, nq, Hq, D], fp32 unless asked otherwise.
        dk, dv: fp32 [B, nk, Hk, D], summed over the query heads of a group.
        dk_columns, dv_columns: fp32 [B, Mv, Hq, D].
    """

    dq: Array
    dk: Array | None
    dv: Array | None
    dk_columns: Array | None
    dv_columns: Array | None
