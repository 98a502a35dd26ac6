"""Blocks that new tokens select, by the Hopper kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.key_codes import block_weights, selected_blocks
from tests.pallas_kernels.helpers.code_cases import (
    SCALE,
    check,
    check_selected,
    make_codes,
    make_weights,
)
from tests.pallas_kernels.helpers.decode_cases import GPU_SIZES


@pytest.mark.parametrize("sizes", GPU_SIZES, ids=str)
def test_weights_match_the_reference(sizes):
    q, keys, seen = make_codes(*sizes)
    run = jax.jit(functools.partial(block_weights, backend="mosaic_gpu"), static_argnums=3)
    weights, totals = run(q, keys, seen, SCALE)
    check((weights, totals), q, keys, seen)
    group, blocks = sizes[1] // sizes[2], sizes[3]
    for again, found in zip(run(q, keys, seen, SCALE), (weights, totals), strict=True):
        np.testing.assert_array_equal(again[:, :, :blocks, :group], found[:, :, :blocks, :group])


@pytest.mark.parametrize("sizes", [*GPU_SIZES, (1, 12, 2, 8196, 128)], ids=str)
def test_blocks_with_much_mass_are_selected(sizes):
    batch, heads, kv_heads, blocks, _ = sizes
    weights, totals, forced = make_weights(batch, heads, kv_heads, blocks)
    known = np.asarray(weights)[:, :, :blocks, : heads // kv_heads]
    q = jnp.zeros((batch, heads, 64), jnp.bfloat16)
    run = jax.jit(functools.partial(selected_blocks, backend="mosaic_gpu"))
    for least in (0.0, 0.3 / blocks, 2.0):
        each = jnp.full(batch, least, jnp.float32)
        check_selected(run(weights, totals, q, forced, each), known, least, forced)
