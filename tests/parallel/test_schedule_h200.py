"""Overlap of ring transfers with attention in XLA's schedule for 8 H200s."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtraining_jax.attention.inputs import AttentionInputs
from mtraining_jax.attention.sharded import make_attention
from mtraining_jax.parallel.compiler import ring_compiler_options
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import HEADS, make_mesh
from mtraining_jax.patterns.dense import Dense
from pallas_kernels import VerticalSlashIndex
from tests.pallas_kernels.mosaic_gpu.hopper import described_h200s
from tests.parallel.hlo_schedule import Transfer, transfers

KEPT = jax.checkpoint_policies.save_only_these_names("attn_out", "attn_lse")
SEQ_LEN, BLOCK, HEADS_Q, HEADS_KV, DIM = 16384, 128, 4, 2, 128


def schedule(ring: str, nodes: int, recomputed: bool = False) -> str:
    """Returns the scheduled program of output and gradients over 8 GPUs, with a sparse index.

    With `recomputed` the backward pass recomputes keys and values, as in a training step.
    """
    mesh = make_mesh(1, nodes, 8 // nodes, described_h200s(8))
    layout = Layout("striped", SEQ_LEN, 8, BLOCK, 1 if ring == "flat" else nodes)
    attention = make_attention(mesh, layout, Dense(BLOCK), ring=ring)

    def layer(q, k, v, index):
        return attention(q, k, v, AttentionInputs(index))[0]

    if recomputed:
        layer = jax.checkpoint(layer, policy=KEPT)

    def both(q, k, v, dout, index):
        out, vjp = jax.vjp(lambda q, k, v: layer(q, k, v, index), q, k, v)
        return out, *vjp(dout)

    shapes = [
        jax.ShapeDtypeStruct(
            (1, SEQ_LEN, n, DIM), jnp.bfloat16, sharding=NamedSharding(mesh, HEADS)
        )
        for n in (HEADS_Q, HEADS_KV, HEADS_KV, HEADS_Q)
    ]
    index = VerticalSlashIndex(
        *(
            jax.ShapeDtypeStruct((1, HEADS_Q, *n), jnp.int32, sharding=NamedSharding(mesh, P()))
            for n in ((64,), (), (500,), ())
        ),
        BLOCK,
    )
    options = ring_compiler_options(mesh.devices.flat[0].platform)
    assert options
    # The device of the abstract mesh determines the backend.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(both, compiler_options=options).trace(*shapes, index)
        return traced.lower(lowering_platforms=("cuda",)).compile().as_text()


needs_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the CUDA plugin of JAX"
)


@needs_plugin
@pytest.mark.timeout(900)  # compiles every kernel several times
def test_gather_and_scatter_overlap_kernels():
    found = transfers(schedule("gather", 1, recomputed=True), ("all-gather", "reduce-scatter"))
    assert {t.backward for t in found} == {True, False}
    assert all(t.hidden for t in found)


@needs_plugin
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("ring", "nodes", "exposed"), [("flat", 1, 1), ("hierarchical", 2, 5)])
def test_every_transfer_but_the_last_hop_home_overlaps_a_kernel(ring, nodes, exposed):
    found = transfers(schedule(ring, nodes))
    forward = [t for t in found if not t.backward]
    assert forward and all(t.hidden for t in forward)
    # The gradients of the last keys still have to travel after all kernels are done.
    late = [t for t in found if not t.hidden]
    assert len(late) <= exposed and len(late) < len(found) - len(forward)
    assert all(t.computation.startswith("main") for t in late)


def test_the_schedule_parser():
    text = """
%body (p: (bf16[2])) -> (bf16[2]) {
  %start.1 = ((bf16[2], bf16[2]), (bf16[2], bf16[2])) collective-permute-start(%a, %b)
  %kernel.1 = f32[2]{0} custom-call(%q), custom_call_target="mosaic_gpu_v2"
  %done.1 = (bf16[2], bf16[2]) collective-permute-done(%start.1)
  %start.2 = (bf16[2], bf16[2]) collective-permute-start(%c), op_name="jit(f)/transpose(jvp())"
  %done.2 = bf16[2] collective-permute-done(%start.2)
  ROOT %kernel.2 = f32[2]{0} custom-call(%q), custom_call_target="mosaic_gpu_v2"
}

ENTRY %main.1 (p: bf16[2]) -> bf16[2] {
  %start.3 = (bf16[2], bf16[2]) collective-permute-start(%p)
  %loop = (bf16[2]) while(%x), condition=%cond, body=%body
  %done.3 = bf16[2] collective-permute-done(%start.3)
  %start.4 = (bf16[2], bf16[2]) collective-permute-start(%p)
  %other = f32[2]{0} custom-call(%q), custom_call_target="cublas"
  %done.4 = bf16[2] collective-permute-done(%start.4)
  ROOT %sync = bf16[2] collective-permute(%done.4)
}
"""
    assert transfers(text) == [
        Transfer("body", backward=False, hidden=True, last=False),
        Transfer("body", backward=True, hidden=False, last=False),
        Transfer("main.1", backward=False, hidden=True, last=False),
        Transfer("main.1", backward=False, hidden=False, last=True),
        Transfer("main.1", backward=False, hidden=False, last=True),
    ]
