"""Blocks that new tokens select, by the Hopper kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.key_codes import block_weights, kept_blocks
from tests.pallas_kernels.helpers.code_cases import SCALE, check, keep_rule, make_codes
from tests.pallas_kernels.helpers.decode_cases import GPU_SIZES


@pytest.mark.parametrize("sizes", GPU_SIZES, ids=str)
def test_weights_match_the_reference_and_kept_blocks_those_of_xla(sizes):
    q, keys, seen = make_codes(*sizes)
    run = jax.jit(functools.partial(block_weights, backend="mosaic_gpu"), static_argnums=3)
    weights = run(q, keys, seen, SCALE)
    check(weights, q, keys, seen)
    np.testing.assert_array_equal(weights, run(q, keys, seen, SCALE))
    for tau in (0.5, 0.9, 1.0):
        rule = keep_rule(seen.shape[1], tau, 1)
        keep = functools.partial(kept_blocks, weights, q, rule)
        blocks, counts = keep("mosaic_gpu")
        right, right_counts = keep("xla")
        np.testing.assert_array_equal(counts, right_counts)
        listed = jnp.arange(blocks.shape[-1]) < counts[..., None]
        np.testing.assert_array_equal(jnp.where(listed, blocks, 0), jnp.where(listed, right, 0))
