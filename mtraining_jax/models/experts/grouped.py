"""Products of rows that are sorted by group (expert), each with the matrix of its group.

`sizes` int32 [G] are the numbers of rows of the groups; their sum is at most R.
"""

import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.models.products import precision_of


def grouped_dot(x_RI: Array, weight_GOI: Array, sizes: Array) -> Array:
    """y = x W^T by group, [R, O], in the dtype of x; 0 in rows without a group."""
    return _ragged(x_RI, weight_GOI, sizes, (((1,), (2,)), ((), ())), [0], x_RI.dtype)


def grouped_transposed(y_RO: Array, weight_GOI: Array, sizes: Array) -> Array:
    """x = y W by group, [R, I], in the dtype of y; 0 in rows without a group."""
    return _ragged(y_RO, weight_GOI, sizes, (((1,), (1,)), ((), ())), [0], y_RO.dtype)


def grouped_outer(y_RO: Array, x_RI: Array, sizes: Array) -> Array:
    """The sums y^T x over the rows of each group, fp32 [G, O, I]."""
    return _ragged(y_RO, x_RI, sizes, (((0,), (0,)), ((), ())), [], jnp.float32)


def _ragged(a, b, sizes, contracted, groups, dtype) -> Array:
    numbers = lax.RaggedDotDimensionNumbers(contracted, [0], groups)
    return lax.ragged_dot_general(
        a, b, sizes, numbers, precision=precision_of(a), preferred_element_type=dtype
    )
