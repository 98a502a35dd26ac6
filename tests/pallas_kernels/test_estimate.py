"""The kernels that score key blocks: in Pallas' GPU interpreter, and lowered for a Hopper GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.kernels import estimate
from tests.pallas_kernels.hopper import hopper

TILE, ROWS = 128, 64


@pytest.fixture
def interpret():
    """Interpreter parameters; looks for races at the end."""
    yield plgpu.InterpretGPUParams(detect_races=True)
    try:
        assert not interpreter.get_races().races_found
    finally:
        interpreter.reset_gpu_interpret_mode_state()


def _logits(q, k, block_ids, end):
    """Causal logits fp64 [B, Hq, n, 64, 128], -inf ahead of the query."""
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    k = np.repeat(k, q.shape[1] // k.shape[2], axis=2)
    k = k.reshape(k.shape[0], len(block_ids), TILE, *k.shape[2:])
    queries = end - ROWS + np.arange(ROWS)
    keys = block_ids[:, None] * TILE + np.arange(TILE)
    causal = keys[:, None, :] <= queries[:, None]
    return np.where(causal, np.einsum("bhud,bnkhd->bhnuk", q, k), -np.inf)


# An even group, and an odd one whose last pair of heads is not full. In the second case the last
# queries are before padding, so that one block is ahead of all of them and one of some.
@pytest.mark.parametrize(("heads", "kv_heads", "valid_len"), [(2, 1, None), (3, 1, 430)])
def test_matches_brute_force(heads, kv_heads, valid_len, interpret):
    rng = np.random.default_rng(heads)
    block_ids, num_blocks, scale = np.array([5, 0, 3], np.int32), 6, 0.2
    q = jnp.asarray(rng.normal(size=(1, heads, ROWS, 64)), jnp.bfloat16)
    k = jnp.asarray(rng.normal(size=(1, 3 * TILE, kv_heads, 64)), jnp.bfloat16)
    valid = None if valid_len is None else jnp.int32(valid_len)
    run = dict(scale=scale, valid_len=valid, multiprocessors=2, interpret=interpret)
    logits = _logits(q, k, block_ids, valid_len or num_blocks * TILE)

    peak, total = estimate.block_statistics(q, k, block_ids, num_blocks, **run)
    lowest = np.float64(np.finfo(np.float32).min)  # instead of -inf, where nothing is seen
    expected = np.maximum(logits.max(-1), lowest)
    np.testing.assert_allclose(peak, expected, rtol=1e-5)
    terms = np.exp((logits - expected[..., None]) * scale)
    np.testing.assert_allclose(total, terms.sum(-1), rtol=1e-4)

    peak = logits.max((2, 4)).astype(np.float32)
    to_mass = rng.uniform(1, 9, peak.shape).astype(np.float32)
    got = estimate.block_masses(q, k, block_ids, num_blocks, peak, to_mass, **run)
    columns, own, beyond = map(np.asarray, got)
    weights = np.exp((logits - peak[:, :, None, :, None]) * scale) * to_mass[:, :, None, :, None]
    np.testing.assert_allclose(columns, weights.sum(-2), rtol=1e-4)
    diagonals = np.zeros((1, heads, 3, 2 * TILE))
    for u in range(ROWS):
        diagonals[..., ROWS - 1 - u : ROWS - 1 - u + TILE] += weights[..., u, :]
    np.testing.assert_allclose(own, diagonals[..., :TILE], rtol=1e-4)
    np.testing.assert_allclose(beyond, diagonals[..., TILE:], rtol=1e-4)


def test_each_block_may_have_queries_and_an_end_of_its_own(interpret):
    """Blocks as sequences of one block: the bits of calls for one set of queries."""
    rng, heads, ends, of = np.random.default_rng(7), 2, [40, 128, 300], [1, 1, 0]
    q = jnp.asarray(rng.normal(size=(2, heads, ROWS, 64)), jnp.bfloat16)
    k = jnp.asarray(rng.normal(size=(3, TILE, 1, 64)), jnp.bfloat16)
    peak, to_mass = (jnp.asarray(rng.uniform(4, 5, q.shape[:3]), jnp.float32) for _ in range(2))
    run = dict(scale=0.2, multiprocessors=2, interpret=interpret)

    def both(q, k, peak, to_mass, **more):
        where = q, k, jnp.zeros(1, jnp.int32), 1
        masses = estimate.block_masses(*where, peak, to_mass, **run, **more)
        return *estimate.block_statistics(*where, **run, **more), *masses

    more = dict(valid_len=jnp.array(ends, jnp.int32), queries=jnp.array(of, jnp.int32))
    found = both(q, k, peak, to_mass, **more)
    for n, (end, own) in enumerate(zip(ends, of, strict=True)):
        one = (x[own : own + 1] for x in (q, peak, to_mass))
        q_one, *rows = one
        alone = both(q_one, k[n : n + 1], *rows, valid_len=jnp.int32(end))
        for x, wanted in zip(found, alone, strict=True):
            np.testing.assert_array_equal(x[n], wanted[0])


@pytest.mark.parametrize(
    ("group", "dim", "dtype"),
    [(1, 128, jnp.bfloat16), (5, 64, jnp.float16), (8, 128, jnp.bfloat16)],
)
def test_lowers_for_a_hopper_gpu(group, dim, dtype):
    num_blocks = 1024
    q = jax.ShapeDtypeStruct((2, 2 * group, ROWS, dim), dtype)
    k = jax.ShapeDtypeStruct((2, num_blocks * TILE, 2, dim), dtype)
    ids = jax.ShapeDtypeStruct((num_blocks,), jnp.int32)
    row = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    run = dict(scale=0.1, valid_len=jnp.int32(1000) if group == 5 else None)
    with hopper():
        for kernel, more in (
            (estimate.block_statistics, ()),
            (estimate.block_masses, (row, row)),
        ):
            lowered = jax.jit(functools.partial(kernel, num_blocks=num_blocks, **run)).trace(
                q, k, ids, **dict(zip(("peak", "to_mass"), more, strict=False))
            ).lower(lowering_platforms=("cuda",))
            assert "mosaic_gpu" in lowered.as_text()
