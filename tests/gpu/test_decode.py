"""Attention of new tokens to listed blocks, by the Hopper kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode import DecodeCall, decode
from tests.pallas_kernels.helpers.decode_cases import GPU_SIZES, check, make_call


@pytest.mark.parametrize("sizes", GPU_SIZES, ids=str)
def test_matches_the_reference_and_repeats(sizes):
    call = make_call(*sizes)
    arrays, scale = call[:6], call.scale
    run = jax.jit(lambda *arrays: decode(DecodeCall(*arrays, scale), "mosaic_gpu"))
    found, again = run(*arrays), run(*arrays)
    check(found, call, 4e-3)
    for x, y in zip(found, again, strict=True):
        np.testing.assert_array_equal(x, y)


def test_large_logits_and_equal_keys():
    call = make_call(1, 12, 2, 64, 128)
    peaked = call._replace(q=call.q * 40)
    check(decode(peaked, "mosaic_gpu"), peaked, 8e-3)
    equal = call._replace(k=jnp.ones_like(call.k))
    check(decode(equal, "mosaic_gpu"), equal, 4e-3)
