"""The oracle against a loop over rows in fp64 NumPy, and its masks against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.reference import reference_attention
from tests.pallas_kernels.helpers import brute_force, cases
from tests.pallas_kernels.helpers.cases import Size

SIZE = Size(batch=2, heads=4, kv_heads=2, query_blocks=6, key_blocks=6, block_size=4, dim=8)


@pytest.fixture(scope="module")
def index():
    return cases.vertical_slash(
        np.random.default_rng(0),
        SIZE,
        max_slashes=3,
        max_verticals=5,
        garbage=np.random.default_rng(1),
    )


@pytest.fixture(scope="module")
def results(index):
    """Inputs, mask, and the oracle's results in fp64."""
    rng = np.random.default_rng(2)
    arrays = cases.qkv_dout(rng, SIZE, "float32")
    q, k, v, _ = (np.asarray(x, np.float64) for x in arrays)
    mask = brute_force.index_mask(index, SIZE.seq_len)
    with jax.enable_x64(True):
        out, lse = jax.jit(reference_attention)(*(jnp.asarray(x) for x in (q, k, v)), mask)
        return q, k, v, mask, np.asarray(out), np.asarray(lse)


def test_matches_a_loop_over_rows_in_fp64(results):
    q, k, v, mask, out, lse = results
    assert out.dtype == lse.dtype == np.float64
    expected, expected_lse = brute_force.attention(q, k, v, mask, SIZE.dim**-0.5)
    np.testing.assert_allclose(out, expected, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-13, atol=1e-14)


def test_x64_does_not_leak(results):
    assert jnp.ones(()).dtype == jnp.float32


def test_fp32_is_fp64_rounded(results):
    q, k, v, mask, out, lse = results
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    out32, lse32 = reference_attention(q, k, v, mask)
    assert out32.dtype == lse32.dtype == jnp.float32
    np.testing.assert_allclose(out32, out, rtol=0, atol=2e-6)
    np.testing.assert_allclose(lse32, lse, rtol=0, atol=2e-6)


def test_weights_of_a_row_add_up_to_one(results):
    q, k, v, mask, _, _ = results
    out, _ = reference_attention(q, k, np.ones_like(v), jnp.asarray(mask))
    rows = mask.any(-1).swapaxes(1, 2)
    np.testing.assert_allclose(np.asarray(out)[rows], 1.0, rtol=1e-6)


def test_empty_rows_give_zero_and_no_gradient(results):
    q, k, v, mask, out, lse = results
    empty = ~mask.any(-1)
    assert empty.any() and not empty.all()
    assert (out.swapaxes(1, 2)[empty] == 0).all()
    assert (lse[empty] == -np.inf).all()

    def total(q, k, v):
        out, lse = reference_attention(q, k, v, jnp.asarray(mask))
        return out.sum() + jnp.where(empty, 0.0, lse).sum()

    gradients = jax.jit(jax.grad(total, (0, 1, 2)))
    dq, dk, dv = gradients(*(np.asarray(x, np.float32) for x in (q, k, v)))
    assert (np.asarray(dq).swapaxes(1, 2)[empty] == 0).all()
    assert all(np.isfinite(np.asarray(x)).all() for x in (dq, dk, dv))


def test_gradients_match_finite_differences(results):
    q, k, v, mask, _, _ = results
    rng = np.random.default_rng(3)
    weight = rng.standard_normal(q.shape)
    directions = [rng.standard_normal(x.shape) for x in (q, k, v)]
    with jax.enable_x64(True):

        @jax.jit
        def value(q, k, v):
            return jnp.sum(reference_attention(q, k, v, mask)[0] * weight)

        grads = jax.jit(jax.grad(value, (0, 1, 2)))(q, k, v)
        slope = sum(float((g * d).sum()) for g, d in zip(grads, directions, strict=True))
        step = 1e-6
        ahead, behind = (
            value(*(x + sign * step * d for x, d in zip((q, k, v), directions, strict=True)))
            for sign in (1, -1)
        )
        difference = float(ahead - behind) / (2 * step)
    np.testing.assert_allclose(slope, difference, rtol=1e-8)


def test_scale_defaults_to_the_root_of_the_head_dim(results):
    q, k, v, mask, _, _ = (np.asarray(x) for x in results)
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    a, _ = reference_attention(q, k, v, mask)
    b, _ = reference_attention(q, k, v, mask, scale=SIZE.dim**-0.5)
    c, _ = reference_attention(q, k, v, mask, scale=1.0)
    np.testing.assert_array_equal(a, b)
    assert np.abs(np.asarray(a) - np.asarray(c)).max() > 0.1


def test_generated_indices_are_sparse_and_have_edge_cases():
    """Most heads are sparse; some rows and heads are empty."""
    size = Size(2, 8, 2, query_blocks=24, key_blocks=24, block_size=8, dim=8)
    index = cases.vertical_slash(np.random.default_rng(6), size, max_slashes=4, max_verticals=16)
    mask = brute_force.index_mask(index, size.seq_len)
    density = 2 * mask.mean((2, 3))  # relative to the causal half
    assert 0.02 < np.median(density) < 0.2
    assert density.max() < 0.4
    assert (density == 0).any()
    assert 0.05 < (~mask.any(-1)).mean() < 0.9
    counts = np.asarray(index.slash_count)
    assert counts.max() == 4 and counts.min() == 0
    assert np.asarray(index.vertical_count).max() == 16
