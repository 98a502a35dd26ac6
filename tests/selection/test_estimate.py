import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.attention.sharded import select_index
from mtraining_jax.patterns.vertical_slash import VerticalSlash
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.scores import estimate
from tests.pallas_kernels.mosaic_gpu.hopper import hopper
from tests.patterns import oracle

SHAPES = [
    # batch, seq_len, q heads, kv heads, head_dim, block_size, num_probe_queries, dtype
    (2, 512, 4, 2, 32, 32, 24, jnp.float32),
    (1, 640, 3, 1, 16, 64, 64, jnp.float32),
    (1, 256, 2, 2, 64, 16, 1, jnp.float32),
    (1, 512, 5, 1, 64, 16, 16, jnp.bfloat16),
]


def make(shape, seed=0):
    batch, seq_len, num_heads, kv_heads, head_dim, _, _, dtype = shape
    rng = np.random.default_rng(seed)
    q = 2 * rng.standard_normal((batch, seq_len, num_heads, head_dim))
    k = rng.standard_normal((batch, seq_len, kv_heads, head_dim))
    return jnp.asarray(q, dtype), jnp.asarray(k, dtype)


def last(q, num_probe_queries):
    return q[:, None, -num_probe_queries:].swapaxes(2, 3)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masses_match_dense_attention(shape):
    q, k = make(shape)
    seq_len, head_dim, block_size, num_probe_queries = shape[1], shape[4], shape[5], shape[6]
    num_blocks = seq_len // block_size
    scale = 1.3 * head_dim**-0.5
    vertical, *diagonals = jax.jit(
        lambda q, k: estimate.softmax_scores(
            last(q, num_probe_queries),
            k,
            SelectionContext(jnp.arange(num_blocks), num_blocks, scale=scale),
        )
    )(q, k)
    slash = estimate.join_diagonals(*diagonals)
    probability = (
        oracle.softmax(oracle.last_logits(q, k, num_probe_queries, scale)) / num_probe_queries
    )
    flat = (*vertical.shape[:2], seq_len)
    vertical, slash = (np.asarray(x).reshape(flat) / 2.0**30 for x in (vertical, slash))
    # fp32 logits of size 10 have errors of 1e-6, and so do masses, relative to their size.
    tolerance = dict(rtol=2e-5, atol=3 * 2.0**-30)
    np.testing.assert_allclose(vertical, probability.sum(2), **tolerance)
    np.testing.assert_allclose(slash[..., ::-1], oracle.diagonal_sums(probability), **tolerance)


def test_a_far_peak_leaves_no_mass_elsewhere_and_nothing_overflows():
    shape = (1, 512, 1, 1, 16, 32, 32, jnp.float32)
    q, k = make(shape)
    k = k.at[:, 7].set(0).at[:, 7, :, 0].set(1e4)
    q = q.at[..., 0].set(10.0)
    context = SelectionContext(jnp.arange(16), 16, scale=1.0)
    score = functools.partial(estimate.softmax_scores, context=context)
    vertical, *diagonals = jax.jit(score)(last(q, 32), k)
    slash = estimate.join_diagonals(*diagonals)
    expected = np.zeros(512, np.int32)
    expected[7] = 1 << 30
    np.testing.assert_array_equal(vertical.reshape(-1), expected)
    expected = np.zeros(512, np.int32)
    expected[512 - 32 - 7 : 512 - 7] = (1 << 30) // 32
    np.testing.assert_array_equal(slash.reshape(-1)[::-1], expected)


def test_logit_sums_skip_masked_pairs():
    shape = SHAPES[0]
    q, k = make(shape)
    num_probe_queries, num_blocks = shape[6], shape[1] // shape[5]
    context = SelectionContext(jnp.arange(num_blocks), num_blocks)
    score = functools.partial(estimate.logit_scores, context=context)
    vertical, *diagonals = jax.jit(score)(last(q, num_probe_queries), k)
    slash = estimate.join_diagonals(*diagonals)
    logits = oracle.last_logits(q, k, num_probe_queries, 1.0)
    flat = (*vertical.shape[:2], shape[1])
    np.testing.assert_allclose(vertical.reshape(flat), logits.sum(2), rtol=1e-5, atol=1e-3)
    seen = np.where(np.isinf(logits), 0, logits)
    sums = oracle.diagonal_sums(seen)
    np.testing.assert_allclose(slash.reshape(flat)[..., ::-1], sums, rtol=1e-5, atol=1e-3)
    assert np.isneginf(np.asarray(vertical).reshape(flat)[..., 1 - num_probe_queries :]).all()


# Probe queries, dtype, backend, and the number of Hopper kernels in the selection's H200 program.
ON_HOPPER = [
    (64, jnp.bfloat16, None, 2),
    (64, jnp.float16, "mosaic_gpu", 2),
    (64, jnp.bfloat16, "xla", 0),
    (32, jnp.bfloat16, None, 0),
]


@pytest.mark.parametrize(("num_probe_queries", "dtype", "backend", "count"), ON_HOPPER)
def test_kernels_run_where_supported(num_probe_queries, dtype, backend, count):
    q = jax.ShapeDtypeStruct((1, 1024, 4, 64), dtype)
    k = jax.ShapeDtypeStruct((1, 1024, 2, 64), dtype)
    pattern = VerticalSlash(num_probe_queries=num_probe_queries)

    def select(q, k):
        return select_index(q, k, pattern, block_ids=jnp.arange(8), num_blocks=8, backend=backend)

    with hopper():
        lowered = jax.jit(select).trace(q, k).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@mosaic_gpu_v2(") == count


def test_requesting_kernels_on_a_cpu_raises():
    q = k = jnp.zeros((1, 128, 1, 64), jnp.bfloat16)
    options = {"num_blocks": 1, "backend": "mosaic_gpu"}
    select = functools.partial(select_index, pattern=VerticalSlash(), **options)
    with pytest.raises(ValueError, match="backend='mosaic_gpu' cannot run here"):
        jax.eval_shape(lambda q, k, ids: select(q, k, block_ids=ids), q, k, jnp.arange(1))


@pytest.mark.parametrize("others", [128.0, 128 - 2.0**-16, 2.0**-9])
def test_the_longest_rows_are_summed_without_overflow(others):
    # Of equal blocks, of blocks with the largest low limb, and of small ones and a full block.
    totals = jnp.full(estimate.MAX_BLOCKS, others).at[0].set(128.0)
    limbs = estimate.to_limbs(jnp.ones_like(totals), totals)
    total = estimate.from_limbs(*(x.sum(dtype=jnp.uint32) for x in limbs))
    expected = np.asarray(totals, np.float64).sum()
    assert expected <= estimate.MAX_TOKENS
    np.testing.assert_allclose(total, expected, rtol=1e-6)
