"""Keys and values that MoBA gathers from all ranks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mtraining_jax.attention.all_blocks import all_blocks
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import SEQUENCE_AXES, make_mesh
from mtraining_jax.selection import collectives

RANKS, BLOCK, TOKENS, HEADS, DIM = 8, 4, 64, 2, 16
LAYOUT = Layout("striped", TOKENS, RANKS, BLOCK)


def gathered(x, gather):
    def on_shard(x):
        blocks = LAYOUT.block_ids(jax.lax.axis_index(SEQUENCE_AXES))
        return gather(x, blocks)

    spec = P(None, SEQUENCE_AXES)
    run = jax.shard_map(
        on_shard, mesh=make_mesh(1, 2, 4), in_specs=spec, out_specs=spec, check_vma=False
    )
    return run(x)  # [B, RANKS * S, H, D]: what each rank sees


def in_compute_dtype(x, blocks):
    return all_blocks(LAYOUT.num_blocks, SEQUENCE_AXES, x, blocks)


def through_fp32(x, blocks):
    wide = collectives.all_blocks(x.astype(jnp.float32), blocks, LAYOUT.num_blocks, SEQUENCE_AXES)
    return wide.astype(x.dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_gradients_are_summed_in_fp32_though_the_gather_is_not(dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, TOKENS, HEADS, DIM)), dtype)
    d_all = jnp.asarray(rng.normal(size=(1, RANKS * TOKENS, HEADS, DIM)), dtype)

    def both(gather, x, d_all):
        out, vjp = jax.vjp(functools.partial(gathered, gather=gather), x)
        return out, *vjp(d_all)

    found, wanted = (
        jax.jit(functools.partial(both, gather))(x, d_all)
        for gather in (in_compute_dtype, through_fp32)
    )
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == dtype
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    jaxpr = str(jax.make_jaxpr(functools.partial(both, in_compute_dtype))(x, d_all))
    sums = [line for line in jaxpr.splitlines() if " reduce_scatter[" in line]
    gathers = [line for line in jaxpr.splitlines() if " all_gather[" in line]
    short = {"bfloat16": "bf16", "float32": "f32"}[jnp.dtype(dtype).name]
    # The array once, and block numbers in both passes.
    assert sorted(f":{short}[1,{TOKENS}," in line for line in gathers) == [False, False, True]
    assert sums and all(":f32[" in line for line in sums)
