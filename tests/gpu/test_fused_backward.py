"""One kernel for the whole backward pass: the shared contract, and determinism."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import DenseIndex, DiagonalTiles
from tests.pallas_kernels.helpers import cases
from tests.pallas_kernels.helpers.cases import Size
from tests.pallas_kernels.helpers.contract import AttentionContract, backward, forward
from tests.pallas_kernels.helpers.expected import assert_same_bits
from tests.pallas_kernels.mosaic_gpu.hopper_backends import registered

FUSED = registered("mosaic_gpu, one backward kernel", one_backward_kernel=True)


class _Contract(AttentionContract):
    backend = FUSED
    dtypes = ("bfloat16", "float16")
    block_size = 128
    other_dims = ()
    num_blocks = 16
    group_heads = ((2, 2), (5, 1), (12, 2), (14, 2), (8, 1))  # groups of 1, 5, 6, 7 and 8
    max_slashes = 6
    max_verticals = 200


class TestHeadDim64(_Contract):
    dim = 64


class TestHeadDim128(_Contract):
    dim = 128


def test_vmap_is_bit_identical_to_separate_calls():
    size = Size(3, 4, 2, query_blocks=8, key_blocks=8, block_size=128, dim=64)
    q, k, v, dout = cases.qkv_dout(np.random.default_rng(0), size, "bfloat16")

    def gradients(q, k, v, dout):
        attention = functools.partial(
            pallas_kernels.attention, index=DenseIndex(128), backend="mosaic_gpu"
        )
        return dict(zip(("dq", "dk", "dv"), jax.vjp(attention, q, k, v)[1](dout), strict=True))

    # An axis of 3 before a batch of 1; v is the same for all.
    run = jax.jit(jax.vmap(gradients, in_axes=(0, 0, None, 0)))
    mapped = run(q[:, None], k[:, None], v[:1], dout[:, None])
    for entry in range(3):
        one = slice(entry, entry + 1)
        alone = jax.jit(gradients)(q[one], k[one], v[:1], dout[one])
        assert_same_bits(alone, {name: x[entry] for name, x in mapped.items()})


@pytest.mark.parametrize("around", ["vmap", "scan"])
def test_stacked_fp32_gradients_are_bit_identical_to_separate_calls(around):
    size = Size(3, 4, 2, query_blocks=8, key_blocks=8, block_size=128, dim=64)
    q, k, v, dout = cases.qkv_dout(np.random.default_rng(0), size, "bfloat16")
    tiles = DiagonalTiles.full(1, 4, 8, 8, 128, causal=True)
    # The kernel's fp32 gradients, with no conversion between the kernel and the stack.
    attention = functools.partial(forward, tiles=tiles, backend="mosaic_gpu")
    one_by_one = [slice(entry, entry + 1) for entry in range(3)]
    out, lse = zip(*(attention(q[one], k[one], v[:1]) for one in one_by_one), strict=True)
    delta = [pallas_kernels.delta_of(o, dout[one]) for o, one in zip(out, one_by_one, strict=True)]

    def gradients(q, k, v, dout, lse, delta):
        return backward(q, k, v, dout, lse, delta, tiles, scale=0.125, backend=FUSED)

    def scanned(q, k, v, *rest):
        return jax.lax.map(lambda x: gradients(*x[:2], v, *x[2:]), (q, k, *rest))

    # An axis of 3 before a batch of 1; v is the same for all.
    together = {"vmap": jax.vmap(gradients, in_axes=(0, 0, None, 0, 0, 0)), "scan": scanned}
    mapped = jax.jit(together[around])(
        q[:, None], k[:, None], v[:1], dout[:, None], jnp.stack(lse), jnp.stack(delta)
    )
    for entry, one in enumerate(one_by_one):
        alone = jax.jit(gradients)(q[one], k[one], v[:1], dout[one], lse[entry], delta[entry])
        assert_same_bits(
            {name: getattr(alone, name) for name in ("dq", "dk", "dv")},
            {name: getattr(mapped, name)[entry] for name in ("dq", "dk", "dv")},
        )


@pytest.mark.parametrize(("dim", "heads"), [(64, 14), (128, 16)])
def test_five_runs_over_8k_tokens_are_bit_identical(dim, heads):
    size = Size(1, heads, 2, query_blocks=64, key_blocks=64, block_size=128, dim=dim)
    q, k, v, dout = cases.qkv_dout(np.random.default_rng(dim), size, "bfloat16")
    tiles = DiagonalTiles.full(1, heads, 64, 64, 128, causal=True)
    out, lse = forward(q, k, v, tiles, backend="mosaic_gpu")
    delta = pallas_kernels.delta_of(out, dout)

    def gradients() -> dict[str, jax.Array]:
        grads = backward(q, k, v, dout, lse, delta, tiles, backend=FUSED)
        return {name: getattr(grads, name) for name in ("dq", "dk", "dv")}

    first = gradients()
    for _ in range(4):
        assert_same_bits(first, gradients())
