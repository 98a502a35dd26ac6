"""Blocks that new tokens select by keys in 4 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import key_codes
from pallas_kernels.key_codes import (
    DEVIATIONS,
    KeyCodes,
    block_weights,
    pack,
    selected_blocks,
    unpack,
)
from pallas_kernels.mosaic_gpu.backend import MosaicGpu
from tests.pallas_kernels.helpers.code_cases import (
    SCALE,
    check,
    check_selected,
    decoded,
    make_codes,
    make_weights,
    moments,
)

SIZES = [(2, 6, 2, 6, 64), (1, 9, 1, 67, 128)]  # batch, query and key/value heads, blocks, D


@pytest.fixture
def hopper_kernels(monkeypatch):
    """Runs the Hopper kernels in the interpreter."""
    kernels = MosaicGpu(interpret=plgpu.InterpretGPUParams(detect_races=True)).decoding
    monkeypatch.setattr(key_codes.backends, "decoding_kernels", lambda name, q: kernels)
    return kernels


def lists(found: tuple) -> list[list[list[int]]]:
    blocks, counts = (np.asarray(x) for x in found)
    return [
        [row[:count].tolist() for row, count in zip(*of_sequence, strict=True)]
        for of_sequence in zip(blocks, counts, strict=True)
    ]


def test_codes_are_the_nearest_of_sixteen_values_and_clip_others():
    k = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 128, 64)), jnp.float32)
    k = k.at[0, 0, :, 3].set(1.5)  # a constant component
    mean, deviation = moments(k)
    keys = KeyCodes.of(k, mean, deviation)
    assert keys.codes.dtype == jnp.int32 and keys.codes.shape == (1, 2, 128, 8)
    assert (unpack(pack(unpack(keys.codes) - 8)) == unpack(keys.codes)).all()
    low, high = (np.asarray(mean + x * deviation) for x in (-DEVIATIONS, DEVIATIONS))
    inside = (low <= k) & (k <= high)
    error, half = np.abs(decoded(keys) - np.asarray(k)), (high - low) / 30
    assert (error <= half + 1e-6)[inside].all() and error[inside].max() > 0.1
    np.testing.assert_allclose(decoded(keys)[0, 0, :, 3], 1.5)
    clipped = np.clip(k, low, high)
    np.testing.assert_allclose(decoded(keys)[~inside], clipped[~inside], atol=1e-5)
    assert 0.005 < 1 - inside.mean() < 0.02
    later = keys._replace(codes=keys.code(2 * k[:, :, :5]))
    np.testing.assert_allclose(decoded(later)[:, 1].max(), high[:, 1].max(), atol=1e-5)


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


@pytest.mark.parametrize("sizes", [(2, 6, 2, 6), (1, 9, 1, 1541), (1, 1, 1, 1)])
@pytest.mark.parametrize("backend", ["xla", "hopper"])
def test_blocks_with_much_mass_are_selected(sizes, backend, request):
    if backend == "hopper":
        request.getfixturevalue("hopper_kernels")
    batch, heads, kv_heads, blocks = sizes
    weights, totals, forced = make_weights(*sizes)
    group = heads // kv_heads
    known = np.asarray(weights)[:, :, :blocks, :group]
    q = jnp.zeros((batch, heads, 64), jnp.bfloat16)
    for least in (0.0, 0.3 / blocks, 2.0):
        each = jnp.full(batch, least, jnp.float32)
        found = selected_blocks(weights, totals, q, forced, each)
        check_selected(found, known, least, forced)


def test_a_group_selects_by_the_mean_of_its_heads():
    mass = jnp.array([[0.5, 0.1], [0.2, 0.5], [0.3, 0.4]])
    weights = jnp.log2(mass)[None, None]
    q, none = jnp.zeros((1, 2, 64)), jnp.zeros((1, 3), bool)
    for least, wanted in ((0.34, [1, 2]), (0.36, []), (0.32, [1, 2]), (0.29, [0, 1, 2])):
        found = selected_blocks(weights, jnp.zeros((1, 1, 1, 2)), q, none, jnp.full(1, least))
        assert lists(found) == [[wanted]]


def test_each_sequence_has_a_least_mass_of_its_own(hopper_kernels):
    weights, totals, forced = make_weights(2, 6, 2, 6)
    q = jnp.zeros((2, 6, 64), jnp.bfloat16)
    found = selected_blocks(weights, totals, q, forced[:1], jnp.array([0.0, 2.0]))
    wanted = np.flatnonzero(np.asarray(forced[0])).tolist()
    assert lists(found) == [[[*range(6)]] * 2, [wanted] * 2]
