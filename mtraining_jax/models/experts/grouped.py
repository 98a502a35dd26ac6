"""Products of rows sorted by group (expert), each with the matrix of its group.

XLA (jaxlib 0.11.2) expands `ragged_dot` on NVIDIA GPUs to products with the matrices of all groups,
which take as many times the FLOP and memory as there are groups. So Hopper GPUs have a kernel.
"""

import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.models.products import precision_of
from pallas_kernels import backends


class Groups:
    """Products of one kind of rows.

    Attributes:
        row_tile: sizes of groups must be multiples of it.
    """

    def __init__(self, dtype: jnp.dtype, widths: tuple[int, int]) -> None:
        """Selects the kernel if it can compute matrices of these widths."""
        self._kernel = backends.grouped_product(jnp.dtype(dtype), widths)
        self.row_tile = 1 if self._kernel is None else backends.GROUPED_ROWS

    def dot(self, x_RI: Array, weight_GOI: Array, sizes_G: Array) -> Array:
        """y = x W^T by group, [R, O]; rows without a group are undefined."""
        if self._kernel is not None:
            return self._kernel("dot", x_RI, weight_GOI, sizes_G)
        return _ragged(x_RI, weight_GOI, sizes_G, ((1,), (2,)), [0], x_RI.dtype)

    def transposed(self, y_RO: Array, weight_GOI: Array, sizes_G: Array) -> Array:
        """x = y W by group, [R, I]; rows without a group are undefined."""
        if self._kernel is not None:
            return self._kernel("transposed", y_RO, weight_GOI, sizes_G)
        return _ragged(y_RO, weight_GOI, sizes_G, ((1,), (1,)), [0], y_RO.dtype)

    def outer(self, y_RO: Array, x_RI: Array, sizes_G: Array) -> Array:
        """The sums of y^T x over the rows of each group, fp32 [G, O, I]."""
        if self._kernel is not None:
            return self._kernel("outer", y_RO, x_RI, sizes_G)
        return _ragged(y_RO, x_RI, sizes_G, ((0,), (0,)), [], jnp.dtype(jnp.float32))


def _ragged(
    a: Array,
    b: Array,
    sizes: Array,
    contracted: tuple[tuple[int], tuple[int]],
    groups: list[int],
    dtype: jnp.dtype,
) -> Array:
    numbers = lax.RaggedDotDimensionNumbers((contracted, ((), ())), [0], groups)
    return lax.ragged_dot_general(
        a, b, sizes, numbers, precision=precision_of(a), preferred_element_type=dtype
    )
