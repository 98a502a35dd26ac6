import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtraining_jax.attention.order import layout_for_ring
from mtraining_jax.parallel.layout import KINDS, Layout

LONGEST = 4 * 4 * 6 * 5  # tokens of the largest layout in `layouts`


@st.composite
def layouts(draw):
    nodes, devices = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    block_size, per_rank = draw(st.integers(1, 5)), 2 * draw(st.integers(1, 3))
    seq_len = nodes * devices * per_rank * block_size
    kind = draw(st.sampled_from(KINDS))
    return Layout(kind, seq_len, nodes * devices, block_size, draw(st.sampled_from([1, nodes])))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(layouts())
def test_permutation_matches_its_inverse_and_the_blocks_of_ranks(layout):
    permutation = layout.permutation()
    tokens = np.arange(layout.seq_len)
    assert permutation.dtype == np.int64
    np.testing.assert_array_equal(tokens[permutation][layout.inverse()], tokens)
    shards = permutation.reshape(layout.num_ranks, -1)
    starts = shards[:, :: layout.block_size] // layout.block_size
    for rank in range(layout.num_ranks):
        np.testing.assert_array_equal(layout.block_ids(rank), starts[rank])
        assert (np.diff(starts[rank]) > 0).all()  # local order follows sequence order


@settings(max_examples=12, deadline=None, derandomize=True)
@given(layouts())
def test_every_token_has_one_owner_and_its_local_position_maps_back(layout):
    tokens = np.arange(LONGEST + 3, dtype=np.int32)  # one shape for all layouts: few compilations
    shards = layout.permutation().reshape(layout.num_ranks, -1)
    owners = np.zeros(tokens.size, int)
    for rank in range(layout.num_ranks):
        local = np.asarray(layout.local_positions(jnp.asarray(tokens), rank))
        mine = local >= 0
        owners += mine
        np.testing.assert_array_equal(shards[rank][local[mine]], tokens[mine])
    np.testing.assert_array_equal(owners, tokens < layout.seq_len)


def test_striped_distributes_blocks_round_robin():
    layout = Layout("striped", 16, 4, 2)
    np.testing.assert_array_equal(
        layout.permutation(), [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    )


def test_striped_over_nodes_puts_adjacent_blocks_on_different_nodes():
    layout = Layout("striped", 8, 4, 1, nodes=2)
    blocks = [layout.block_ids(rank).tolist() for rank in range(4)]
    assert blocks == [[0, 4], [2, 6], [1, 5], [3, 7]]  # ranks 0, 1: node 0
    for sizes, ring, same in [
        ((2, 2), "gather", True), ((2, 2), "hierarchical", True),
        ((2, 2), "flat", False), ((4,), "gather", False),
    ]:  # fmt: skip
        assert (layout_for_ring("striped", 8, sizes, 1, ring) == layout) == same


def test_zigzag_pairs_chunks_from_both_ends():
    layout = Layout("zigzag", 8, 2, 1)
    assert [layout.block_ids(rank).tolist() for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_traced_rank_gives_the_same_blocks(kind):
    layout = Layout(kind, 48, 4, 2, nodes=2)
    traced = jax.jit(jax.vmap(layout.block_ids))(jnp.arange(4))
    np.testing.assert_array_equal(traced, [layout.block_ids(rank) for rank in range(4)])


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("striped", 1000, 4, 64), "seq_len=1000 must be a multiple of 256 .*: 768 or 1024"),
        (("zigzag", 768, 4, 64), "seq_len=768 must be a multiple of 512 .*: 512 or 1024"),
        (("striped", 100, 4, 64), "nearest: 256$"),
        (("stripe", 256, 4, 64), "'stripe' is unknown; it must be one of striped, zigzag"),
        (("striped", 256, 0, 64), "num_ranks=0 must be an integer, at least 1"),
        (("striped", 256.0, 4, 64), "seq_len=256.0 must be an integer, at least 1"),
        (("striped", 256, 4, 64, 3), "num_ranks=4 is not a multiple of nodes=3"),
    ],
)
def test_invalid_layouts_raise(args, sentence):
    with pytest.raises(ValueError, match=sentence):
        Layout(*args)
