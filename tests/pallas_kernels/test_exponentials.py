"""Sums of powers of two by polynomials, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.mosaic_gpu.exponentials import exp2_by_polynomial, sum_of_exp2


def test_powers_by_polynomial_are_as_exact_as_is_said():
    ends = -np.inf, -126.5, -125.0, -0.5, -1.5, 0.0
    t = np.concatenate([np.linspace(-130, 0, 100001), ends]).astype(np.float32)
    expected = 2.0 ** np.maximum(t.astype(np.float64), -125)
    np.testing.assert_allclose(jax.jit(exp2_by_polynomial)(t), expected, rtol=8e-5)


def test_quarters_of_the_columns_are_by_polynomials():
    tile = -np.random.default_rng(0).exponential(5, (64, 64)).astype(np.float32)
    tile[:, 7:40] = 0.0  # where a polynomial is 7.2e-5 less than 1
    tile[3] = -np.inf

    @jax.jit
    def sums(tile):
        return [
            sum_of_exp2(tile[:, :n] / 2, 2.0, jnp.zeros(64), quarters)
            for n in (64, 16) for quarters in range(5)
        ]  # fmt: skip

    found = [np.asarray(x) for x in sums(jnp.asarray(tile))]
    below = []
    for n, own in zip((64, 16), (found[:5], found[5:]), strict=True):
        expected = (2.0 ** tile[:, :n].astype(np.float64)).sum(1)
        rows = np.arange(64) != 3
        for x in own:
            np.testing.assert_allclose(x[rows], expected[rows], rtol=8e-5)
            assert 0 <= x[3] <= 64 * 2.0**-125
        np.testing.assert_allclose(own[0][rows], expected[rows], rtol=1e-6)
        below.append([1 - (x[rows] / expected[rows]).mean() for x in own])
    quarters, small = below
    assert all(x + 1e-5 < y for x, y in zip(quarters[:2], quarters[1:3], strict=True))
    assert small[0] == small[1] < 1e-6 < 2e-5 < small[2] == small[4]
