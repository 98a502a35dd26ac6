"""The Hopper kernels: the shared contract at real sizes, then longer and more."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.reference import mask_from_index
from tests.pallas_kernels import cases
from tests.pallas_kernels.cases import Size
from tests.pallas_kernels.contract import AttentionContract
from tests.pallas_kernels.expected import Expected, compare, oracle


class TestMosaicGpu(AttentionContract):
    backend = "mosaic_gpu"
    dtypes = ("bfloat16", "float16")
    block_size = 128
    dim = 128
    other_dims = (64,)
    num_blocks = 16
    max_slashes = 6
    max_verticals = 200


@functools.partial(jax.jit, static_argnames="backend")
def _value_and_gradients(q, k, v, dout, index, *, backend):
    def attention(q, k, v):
        return pallas_kernels.vertical_slash_attention(q, k, v, index, backend=backend)

    out, vjp = jax.vjp(attention, q, k, v)
    return dict(zip(("out", "dq", "dk", "dv"), (out, *vjp(dout)), strict=True))


@pytest.mark.parametrize("dim", [64, 128])
def test_matches_xla_in_fp32_at_64k_tokens(dim):
    rng = np.random.default_rng(dim)
    size = Size(1, 8, 2, query_blocks=512, key_blocks=512, block_size=128, dim=dim)
    index = cases.vertical_slash(rng, size, max_slashes=32, max_verticals=1000)
    inputs = cases.qkv_dout(rng, size, "bfloat16")
    actual = _value_and_gradients(*inputs, index, backend="mosaic_gpu")
    expected = _value_and_gradients(
        *(x.astype(jnp.float32) for x in inputs), index, backend="xla"
    )
    for name, x in actual.items():
        typical = jnp.sqrt(jnp.mean(expected[name] ** 2))
        compare(name, x, Expected(expected[name], jnp.full(x.shape, typical)), x.dtype)


@pytest.mark.parametrize("dim", [64, 128])
def test_a_hundred_random_masks(dim):
    rng = np.random.default_rng(1000 + dim)
    size = Size(1, 8, 2, query_blocks=16, key_blocks=16, block_size=128, dim=dim)
    mask_of = jax.jit(mask_from_index, static_argnums=1)
    for _ in range(100):
        index = cases.vertical_slash(rng, size, max_slashes=5, max_verticals=150, garbage=rng)
        inputs = cases.qkv_dout(rng, size, "bfloat16")
        actual = _value_and_gradients(*inputs, index, backend="mosaic_gpu")
        expected = oracle(*inputs, mask_of(index, size.seq_len))
        for name, x in actual.items():
            compare(name, x, expected[name], x.dtype)
