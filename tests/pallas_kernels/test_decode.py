"""Attention of new tokens to listed blocks of a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode import combine, decode
from pallas_kernels.mosaic_gpu.backend import MosaicGpu
from pallas_kernels.mosaic_gpu.kernels import decode as decode_module
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
    kernels = MosaicGpu(interpret=plgpu.InterpretGPUParams(detect_races=True)).decoding
    check(kernels.attend(call), call, 4e-3)


def test_a_kernel_combines_the_parts_of_many_thread_blocks(monkeypatch):
    monkeypatch.setattr(decode_module, "multiprocessors", lambda interpret: 35)  # 70 parts
    kernels = MosaicGpu(interpret=plgpu.InterpretGPUParams(detect_races=True)).decoding
    call = make_call(1, 3, 1, 18, 64)._replace(counts=jnp.full((1, 1), 18, jnp.int32))
    check(kernels.attend(call), call, 4e-3)
    nothing = call._replace(counts=jnp.zeros((1, 1), jnp.int32))
    check(kernels.attend(nothing), nothing, 4e-3)


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


def test_wide_heads_take_xla_and_say_so(caplog):
    call = make_call(1, 2, 1, 4, 192)
    with hopper(), caplog.at_level("WARNING"):
        text = jax.jit(lambda *arrays: decode(call._replace(q=arrays[0]), "mosaic_gpu")).trace(
            call.q
        )
    assert "new tokens attend by the portable XLA backend: head dim 192" in caplog.text
    assert "mosaic_gpu" not in str(text.jaxpr)
    check(decode(call), call, 4e-3)


def test_fp32_products_are_exact():
    """GPUs take TF32 for fp32 operands unless told otherwise."""
    call = make_call(1, 2, 1, 2, 64)
    for dtype, exact in (("float32", True), ("bfloat16", False)):
        q, k, v = (x.astype(dtype) for x in call[:3])
        traced = jax.make_jaxpr(lambda *x: decode(call._replace(q=x[0], k=x[1], v=x[2])))(q, k, v)
        assert str(traced).count("dot_general") == 2
        assert ("HIGHEST" in str(traced)) == exact
