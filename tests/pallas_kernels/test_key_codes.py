"""Blocks that new tokens select by keys in 4 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import backends, key_codes
from pallas_kernels.key_codes import KeyCodes, block_weights, kept_blocks
from pallas_kernels.mosaic_gpu.backend import MosaicGpu
from tests.pallas_kernels.helpers.code_cases import (
    SCALE,
    check,
    decoded,
    ends,
    keep_rule,
    kept_sets,
    make_codes,
)

SIZES = [(2, 6, 2, 6, 64), (1, 9, 1, 67, 128)]  # batch, query and key/value heads, blocks, D


@pytest.fixture
def hopper_kernels(monkeypatch):
    """Runs the Hopper kernels in the interpreter."""
    kernels = MosaicGpu(interpret=plgpu.InterpretGPUParams(detect_races=True)).decoding
    monkeypatch.setattr(key_codes.backends, "decoding_kernels", lambda name, q: kernels)
    return kernels


def lists(found: tuple) -> list[list[int]]:
    blocks, counts = (np.asarray(x) for x in found)
    rows = blocks.reshape(-1, blocks.shape[-1])
    return [row[:count].tolist() for row, count in zip(rows, counts.reshape(-1), strict=True)]


def test_codes_are_the_nearest_of_sixteen_values_and_clip_later_keys():
    k = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 128, 64)), jnp.float32)
    k = k.at[0, 0, :, 3].set(1.5)  # a constant component
    keys = KeyCodes.of(k, *ends(k))
    assert keys.codes.dtype == jnp.int8 and keys.codes.shape == (1, 2, 128, 32)
    step = np.asarray(k.max(2) - k.min(2))[:, :, None] / 15
    error = np.abs(decoded(keys) - np.asarray(k))
    assert (error <= step / 2 + 1e-6).all() and error.max() > 0.1
    np.testing.assert_allclose(decoded(keys)[0, 0, :, 3], 1.5)
    beyond = decoded(keys._replace(codes=keys.code(2 * k)))[:, 1]
    assert (beyond <= np.asarray(k.max(2))[:, 1, None] + 1e-6).all() and (beyond > step[:, 1]).any()


@pytest.mark.parametrize("sizes", SIZES)
def test_weights_by_xla(sizes):
    q, keys, seen = make_codes(*sizes)
    check(jax.jit(block_weights)(q, keys, seen, SCALE), q, keys, seen)


@pytest.mark.parametrize("sizes", SIZES)
def test_weights_by_the_hopper_kernel(sizes, hopper_kernels):
    q, keys, seen = make_codes(*sizes)
    check(block_weights(q, keys, seen, SCALE), q, keys, seen)


def test_fp32_queries_are_not_rounded():
    q, keys, seen = make_codes(1, 2, 1, 4, 64)
    text = str(jax.make_jaxpr(lambda q: block_weights(q, keys, seen, SCALE))(q.astype("float32")))
    assert "bf16" not in text and text.count("HIGHEST") >= 2


@pytest.mark.parametrize("sizes", [(2, 6, 2, 6), (1, 9, 1, 67), (1, 1, 1, 1)])
@pytest.mark.parametrize("backend", ["xla", "hopper"])
def test_the_heaviest_blocks_are_kept(sizes, backend, request):
    if backend == "hopper":
        request.getfixturevalue("hopper_kernels")
    batch, heads, kv_heads, blocks = sizes
    group = heads // kv_heads
    weights = np.full((batch, kv_heads, blocks, -(-group // 8) * 8), -np.inf, np.float32)
    rng = np.random.default_rng(1)
    weights[..., :group] = rng.normal(size=(*weights.shape[:3], group)) * 3 + 200
    weights[:, :, blocks // 2 + 1 :: 7] = -np.inf  # no keys are seen
    q = jnp.zeros((batch, heads, 64), jnp.bfloat16)
    for tau, first, local in ((0.6, 1, 0), (0.9, 0, 1), (0.3, 0, 0), (1.0, 0, 0)):
        found = kept_blocks(jnp.asarray(weights), q, keep_rule(blocks, tau, first, local))
        forced = {*range(first), *range(blocks - local, blocks)}
        assert lists(found) == kept_sets(weights[..., :group], tau, forced), (tau, first, local)
    if blocks > 2:  # only those from the second block to the one before the last
        rule = keep_rule(blocks, 1.0, 0)._replace(
            first=jnp.full((1, 1), 1, jnp.int32), own=jnp.full((1, 1), blocks - 2, jnp.int32)
        )
        inner = kept_sets(weights[:, :, 1:-1, :group], 1.0, set())
        found = lists(kept_blocks(jnp.asarray(weights), q, rule))
        assert found == [[block + 1 for block in row] for row in inner]


def test_a_group_keeps_by_the_mean_of_its_heads():
    weights = jnp.log2(jnp.array([[0.5, 0.1], [0.2, 0.5], [0.3, 0.4]]))  # sums 0.6, 0.7, 0.7
    weights = jnp.full((1, 1, 3, 8), -jnp.inf).at[0, 0, :, :2].set(weights)
    q = jnp.zeros((1, 2, 64))
    assert lists(kept_blocks(weights, q, keep_rule(3, 0.34, 0))) == [[1]]  # ties: the earlier one
    assert lists(kept_blocks(weights, q, keep_rule(3, 0.36, 0))) == [[1, 2]]
    nothing = jnp.full((1, 1, 3, 8), -jnp.inf)
    assert lists(kept_blocks(nothing, q, keep_rule(3, 0.9, 0))) == [[]]


def test_longer_caches_than_the_kernel_supports_are_left_to_xla(hopper_kernels, monkeypatch):
    few = hopper_kernels._replace(most_blocks=66, kept_blocks=None)
    monkeypatch.setattr(backends, "decoding_kernels", lambda name, q: few)
    weights = jnp.zeros((1, 1, 67, 8))
    assert len(lists(kept_blocks(weights, jnp.zeros((1, 8, 64)), keep_rule(67, 0.5, 0)))[0]) == 34
