"""Compiled sparse attention on an H200: memory, and the number of kernel calls."""

import dataclasses
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mtraining_jax.patterns.sampled_rows import SampledRows
from mtraining_jax.selection.context import SelectionContext
from pallas_kernels import BlockMaskIndex, DenseIndex, VerticalSlashIndex, attention
from pallas_kernels.mosaic_gpu.backend import CONFIGS
from tests.pallas_kernels.mosaic_gpu.hopper import described_h200s

BLOCK = 128

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the CUDA plugin of JAX"
)


@pytest.fixture
def h200() -> Mesh:
    """One described H200."""
    return Mesh(np.array(described_h200s(1)), ("x",), axis_types=(AxisType.Auto,))


def _shape(mesh, *sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def _index(mesh, heads: int, seq_len: int, max_verticals: int) -> VerticalSlashIndex:
    sizes = (seq_len // BLOCK,), (), (max_verticals,), ()
    return VerticalSlashIndex(
        *(_shape(mesh, 1, heads, *size, dtype=jnp.int32) for size in sizes), BLOCK
    )


def _compile(mesh, f, *args):
    # The device of the abstract mesh determines the backend.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).compile()


def test_output_and_gradients_at_512k_tokens_need_little_extra_memory(h200):
    seq_len, heads = 524288, 16
    q, k = (_shape(h200, 1, seq_len, n, 128) for n in (heads, 2))

    def both(q, k, v, dout, index):
        out, vjp = jax.vjp(lambda q, k, v: attention(q, k, v, index), q, k, v)
        return out, *vjp(dout)

    compiled = _compile(h200, both, q, k, k, q, _index(h200, heads, seq_len, 4096))
    # dk and dv in fp32 are 1.07 GB: they use the memory of dq, which is written later.
    assert compiled.memory_analysis().temp_size_in_bytes < 0.2e9


def test_the_memory_of_a_selection_grows_with_the_length(h200):
    def temporary(seq_len):
        q, k = (_shape(h200, 1, seq_len, n, 128) for n in (16, 2))

        def bits(q, k):
            blocks = jnp.arange(seq_len // BLOCK, dtype=jnp.int32)
            context = SelectionContext(blocks, seq_len // BLOCK)
            return SampledRows().select(q, k, context).index.bits

        return _compile(h200, bits, q, k).memory_analysis().temp_size_in_bytes

    short, long = temporary(2**19), temporary(2**21)
    assert short < 0.5e9 and long < 4.5 * short


@pytest.mark.parametrize(
    ("fused_sparse_bytes", "backward"),
    [(2**31, ("attention_backward",)), (0, ("attention_dkdv", "attention_dq"))],
)
def test_every_kernel_runs_once_in_layers_that_save_its_results(
    h200, monkeypatch, fused_sparse_bytes, backward
):
    """A scan stacks the residuals of the backward pass, and the model uses the same output."""
    layers, seq_len, heads, dim = 3, 1024, 2, 64
    config = dataclasses.replace(CONFIGS[dim], fused_sparse_bytes=fused_sparse_bytes)
    monkeypatch.setitem(CONFIGS, dim, config)
    keep = jax.checkpoint_policies.save_only_these_names("attn_out", "attn_lse")

    def loss(weights, x, index):
        def layer(x, w):
            q, k, v = (jnp.tanh(x * c) for c in w)
            return x + attention(q, k, v, index), None

        return jax.lax.scan(jax.checkpoint(layer, policy=keep), x, weights)[0].sum()

    x = _shape(h200, 1, seq_len, heads, dim)
    index = _index(h200, heads, seq_len, 128)
    compiled = _compile(h200, jax.grad(loss), _shape(h200, layers, 3, heads, dim), x, index)
    calls = [x for x in compiled.as_text().splitlines() if 'custom_call_target="mosaic_gpu' in x]
    for kernel in ("attention_forward", "attention_delta", *backward):
        assert sum(kernel in call for call in calls) == 1


def _gradients(q, k, v, dout):
    dense = DenseIndex(BLOCK)
    return jax.vjp(lambda *qkv: attention(*qkv, dense), q, k, v)[1](dout)


@pytest.mark.parametrize("around", ["scan", "vmap"])
def test_the_kernel_that_adds_to_dq_in_place_is_not_fused_with_slices(h200, around):
    """A fusion would ignore that dq and its counters are written in place: wrong gradients."""
    batch, seq_len, heads, dim = 3, 1024, 2, 64
    stacked = _shape(h200, batch, 1, seq_len, heads, dim)

    def scanned(*args):
        return jax.lax.scan(lambda _, x: (None, _gradients(*x)), None, args)[1]

    together = {"vmap": jax.vmap(_gradients), "scan": scanned}
    text = _compile(h200, together[around], *[stacked] * 4).as_text()
    kernel = re.compile("attention_backward.*mosaic_gpu|mosaic_gpu.*attention_backward")
    holders = [x.split()[0] for x in re.split(r"\n(?=%|ENTRY)", text) if kernel.search(x)]
    assert len(holders) == 1
    assert f"calls={holders[0]}" not in text


@pytest.mark.parametrize("around", ["scan", "vmap", "vmap of keys", "two calls"])
def test_the_counter_of_work_items_is_no_other_operand(h200, around):
    """It is written. XLA joins equal operands, and fusions with slices ignore what is in place."""
    layers, blocks, heads, dim = 3, 8, 2, 64
    one = _shape(h200, 1, blocks * BLOCK, heads, dim)
    stacked = _shape(h200, layers, *one.shape)
    bits = _shape(h200, 1, heads, blocks, 1, dtype=jnp.uint32)
    every_bits = _shape(h200, layers, *bits.shape, dtype=jnp.uint32)

    def gradients(q, k, v, dout, bits):
        index = BlockMaskIndex(bits, blocks, BLOCK)
        return jax.vjp(lambda *qkv: attention(*qkv, index), q, k, v)[1](dout)

    def scanned(*args):
        return jax.lax.scan(lambda _, x: (None, gradients(*x)), None, args)[1]

    def of_keys(q, k, v, dout, bits):
        return jax.vmap(lambda k, v: gradients(q, k, v, dout, bits))(k, v)

    def two(q, k, v, dout, bits):
        return gradients(q, k, v, dout, bits), gradients(q, v, k, dout, bits)

    together, args, calls = {
        "vmap": (jax.vmap(gradients), (*[stacked] * 4, every_bits), 4),
        "scan": (scanned, (*[stacked] * 4, every_bits), 4),
        "vmap of keys": (of_keys, (one, stacked, stacked, one, bits), 4),
        "two calls": (two, (*[one] * 4, bits), 8),
    }[around]
    text = _compile(h200, together, *args).as_text()
    found = re.findall(r'custom-call\((.*?)\), custom_call_target="mosaic_gpu', text)
    operands = [re.findall(r"%[\w.#-]+", call) for call in found]
    assert len(operands) == calls
    assert all(len(set(x)) == len(x) for x in operands)
    if around == "two calls":
        # After the constant offset of masked tiles.
        counters = [x[-1] for x in operands if x[-2].startswith("%constant")]
        assert len(set(counters)) == len(counters) == 4
