"""Sums of exponentials along the rows of a tile, some of them by polynomials.

A multiprocessor computes 16 powers of two a clock in the unit for such functions, and 128 products
and sums in others. FlashAttention-4 (arXiv 2603.05451) computes a part of the powers by products
and sums: 2^t is 2^n times 2^f, where n is the nearest whole number and f at most a half, and the
factor of n is added to the exponent's bits.
"""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.mosaic_gpu.common import EDGE, fold, rows_to_tile

# Adding it leaves no bits for fractions: it rounds, and the low bits hold the whole number.
_ROUNDING = 1.5 * 2.0**23
_EXPONENT_SHIFT = 23
_LOWEST = -125.0  # so that a power a little less than it is still a normal number
# 2^f for |f| <= 1/2 with the least largest relative error, 7.5e-5 (Remez).
_COEFFICIENTS = 0.9999280735, 0.6932609855, 0.2426111222, 0.0551716690
_QUARTERS = 4


def sum_of_exp2(tile: Array, scale: float, base: Array, polynomial_quarters: int) -> Array:
    """Sums of powers of two along the rows of a tile, 2^(scale x - base): fp32 [64].

    Args:
        tile: fp32 [64, n], n a power of two and at least 8; may hold -inf.
        scale: of its entries.
        base: fp32 [64], of each row, no less than `scale` times the row's largest entry.
        polynomial_quarters: of the columns, 0 to 4, how many quarters are computed by polynomials,
            with a relative error of at most 8e-5, and at least 2^-125. A tile that has no quarters
            of eight columns is not divided: with 2 to 4 it is one by polynomials.
    """

    def exponents(tile: Array) -> Array:
        return tile * scale - rows_to_tile(base, tile)

    if not polynomial_quarters:
        return fold(jnp.add, jnp.exp2(exponents(tile))).sum(axis=1)
    parts = _QUARTERS if tile.shape[1] >= _QUARTERS * EDGE else 1
    width = tile.shape[1] // parts
    by_polynomial = polynomial_quarters if parts > 1 else polynomial_quarters // 2
    total = None
    for i in range(parts):
        own = exponents(tile[:, i * width : (i + 1) * width])
        folded = fold(jnp.add, exp2_by_polynomial(own) if i < by_polynomial else jnp.exp2(own))
        total = folded if total is None else total + folded
    return total.sum(axis=1)


def exp2_by_polynomial(t: Array) -> Array:
    """2^t for fp32 t <= 0, or 2^-125 where that is more; relative error at most 8e-5."""
    t = jnp.maximum(t, _LOWEST)
    # XLA, for which the interpreter compiles, would take the constant off again.
    rounded = lax.optimization_barrier(t + _ROUNDING)
    f = t - (rounded - _ROUNDING)
    power = _COEFFICIENTS[-1]
    for coefficient in _COEFFICIENTS[-2::-1]:
        power = power * f + coefficient
    shift = lax.bitcast_convert_type(rounded, jnp.int32) << _EXPONENT_SHIFT
    return lax.bitcast_convert_type(lax.bitcast_convert_type(power, jnp.int32) + shift, jnp.float32)
