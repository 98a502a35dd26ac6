import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pallas_kernels import BlockSparseIndex, VerticalSlashIndex
from tests.pallas_kernels import brute_force
from tests.pallas_kernels.properties import repeatable

from_block_mask = jax.jit(
    BlockSparseIndex.from_block_mask, static_argnames=("block_size", "causal")
)


@repeatable
@given(
    st.sampled_from([(4, 4), (3, 6), (6, 3)]).flatmap(
        lambda shape: arrays(bool, (1, 2, *shape))
    ),
    st.booleans(),
)
def test_block_lists_and_their_transpose_describe_the_mask(mask, causal):
    index = from_block_mask(mask, block_size=4, causal=causal)
    expected = np.tril(mask) if causal else mask
    _assert_lists(index.key_blocks, index.key_count, expected)
    _assert_lists(index.query_blocks, index.query_count, expected.swapaxes(-1, -2))
    assert (index.block_size, index.causal) == (4, causal)


def _assert_lists(lists, count, mask):
    """Lists are ascending, without repeats, and padded past the last block."""
    lists, count = np.asarray(lists), np.asarray(count)
    assert lists.dtype == count.dtype == np.int32
    for at in np.ndindex(*count.shape):
        assert lists[at][: count[at]].tolist() == np.flatnonzero(mask[at]).tolist()
        assert (lists[at][count[at] :] == mask.shape[-1]).all()


def test_dense_index_computes_every_causal_pair():
    index = VerticalSlashIndex.dense(batch=2, num_heads=3, seq_len=24, block_size=4)
    mask = brute_force.index_mask(index, 24)
    assert mask.shape == (2, 3, 24, 24)
    np.testing.assert_array_equal(mask, np.broadcast_to(np.tril(np.ones((24, 24))), mask.shape))


def test_dense_index_wants_whole_blocks():
    with pytest.raises(ValueError, match="seq_len=30 is not a multiple of block_size=4"):
        VerticalSlashIndex.dense(batch=1, num_heads=1, seq_len=30, block_size=4)


def test_indices_pass_through_jit_and_scan_with_their_static_fields():
    index = VerticalSlashIndex.dense(batch=1, num_heads=2, seq_len=8, block_size=4)
    blocks = BlockSparseIndex.from_block_mask(jnp.ones((1, 2, 2, 2), bool), 4, causal=False)

    @jax.jit
    def through_scan(index):
        layers = jax.tree.map(lambda x: jnp.stack([x, x]), index)
        return jax.lax.scan(lambda carry, layer: (carry, layer), None, layers)[1]

    for before in (index, blocks):
        after = through_scan(before)
        assert type(after) is type(before)
        assert after.block_size == 4
        assert jax.tree.structure(after) == jax.tree.structure(before)
        same = jax.tree.map(lambda a, b: bool((a[0] == b).all()), after, before)
        assert all(jax.tree.leaves(same))
    assert functools.reduce(lambda n, x: n + x.size, jax.tree.leaves(blocks), 0) == 24
