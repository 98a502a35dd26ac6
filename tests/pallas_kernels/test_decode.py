"""Attention of new tokens to listed blocks of a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode import combine, decode
from pallas_kernels.mosaic_gpu.backend import MosaicGpu
from tests.pallas_kernels.helpers.decode_cases import check, make_call
from tests.pallas_kernels.mosaic_gpu.hopper import hopper

SIZES = [(2, 6, 2, 6, 64), (1, 9, 1, 5, 128)]  # batch, query and key/value heads, blocks, D


@pytest.mark.parametrize("sizes", SIZES)
def test_xla(sizes):
    call = make_call(*sizes)
    check(jax.jit(decode)(call), call, 4e-3)


@pytest.mark.parametrize("sizes", SIZES)
def test_the_hopper_kernel(sizes):
    call = make_call(*sizes)
    kernels = MosaicGpu(interpret=plgpu.InterpretGPUParams(detect_races=True))
    check(kernels.decode(call), call, 4e-3)


def test_parts_combine_to_the_whole():
    call = make_call(1, 2, 1, 4, 64)
    lists, counts = call.blocks, call.counts.at[0, 0].set(4)
    parts = [
        decode(call._replace(blocks=lists[..., part], counts=jnp.minimum(counts, 2)))
        for part in (slice(0, 2), slice(2, 4))
    ]
    out, lse = combine(*(jnp.stack(x) for x in zip(*parts, strict=True)), axis=0)
    check((out, lse), call._replace(counts=counts), 4e-3)
    nothing = [jnp.zeros((2, 1, 4)), jnp.full((2, 1), -jnp.inf)]
    out, lse = combine(*nothing, axis=0)
    assert not np.asarray(out).any() and np.isneginf(lse).all()


def test_heads_without_a_kernel_take_xla_or_say_so():
    call = jax.eval_shape(lambda: make_call(1, 2, 1, 4, 192))
    with hopper():
        found = jax.eval_shape(decode, call)
        assert found[0].shape == (1, 2, 192)
        with pytest.raises(
            ValueError, match=r"no kernel for decoding: head dim 192 \(must be 64 or"
        ):
            jax.eval_shape(lambda call: decode(call, "mosaic_gpu"), call)
