"""Keys and values that MoBA gathers from all ranks, and the sums of their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import SEQUENCE_AXES, make_mesh
from mtraining_jax.parallel.ring.ring_attention import RankBlocks

RANKS, BLOCK, TOKENS, HEADS, DIM = 8, 4, 64, 2, 16
LAYOUT = Layout("striped", TOKENS, RANKS, BLOCK)
BLOCKS = RankBlocks(LAYOUT, SEQUENCE_AXES)
SHARDED = P(None, SEQUENCE_AXES)


def on_ranks(f):
    mesh = make_mesh(1, 2, 4)
    return jax.shard_map(f, mesh=mesh, in_specs=SHARDED, out_specs=SHARDED, check_vma=False)


def test_a_rank_gets_all_keys_in_order_in_their_own_dtype():
    x = jnp.arange(TOKENS, dtype=jnp.bfloat16)[None, :, None, None]
    shards = x.reshape(1, -1, BLOCK, 1, 1)[:, LAYOUT.block_order()].reshape(x.shape)
    found = on_ranks(BLOCKS.all)(shards).reshape(RANKS, TOKENS)  # what each rank sees
    np.testing.assert_array_equal(found, np.broadcast_to(np.arange(TOKENS), found.shape))
    jaxpr = str(jax.make_jaxpr(on_ranks(BLOCKS.all))(shards))
    gathers = [line for line in jaxpr.splitlines() if " all_gather[" in line]
    assert any(":bf16[" in line for line in gathers)
    assert not any(":f32[" in line for line in gathers)


def test_gradients_of_all_ranks_are_summed_in_fp32_and_each_keeps_its_blocks():
    d_all = np.random.default_rng(0).normal(size=(1, RANKS * TOKENS, HEADS, DIM))
    found = jax.jit(on_ranks(BLOCKS.local))(jnp.asarray(d_all, jnp.float32))
    assert found.dtype == jnp.float32
    sums = d_all.reshape(RANKS, TOKENS // BLOCK, BLOCK, HEADS, DIM).sum(0)
    expected = sums[LAYOUT.block_order()].reshape(1, TOKENS, HEADS, DIM)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    jaxpr = jax.make_jaxpr(on_ranks(BLOCKS.local))(jnp.asarray(d_all, jnp.bfloat16))
    sums = [line for line in str(jaxpr).splitlines() if " reduce_scatter[" in line]
    assert sums and all(":f32[" in line for line in sums)
