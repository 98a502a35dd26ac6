"""How evenly the ranks of a ring share work, against masks and known properties of layouts."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.ring.balance import (
    imbalance_of_steps,
    layer_imbalance,
    step_imbalance,
    tiles_per_step,
)
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.ring.topology import RingTopology
from pallas_kernels.index import DenseIndex, VerticalSlashIndex
from pallas_kernels.reference import mask_from_index
from tests.parallel import indices


def topology_of(kind, nodes, devices, ring, seq_len=indices.SEQ_LEN, block=None, spread=True):
    layout = Layout(
        kind, seq_len, nodes * devices, block or indices.BLOCK_SIZE,
        nodes if ring != "flat" and spread else 1,
    )  # fmt: skip
    return RingTopology(layout, ("node", "device"), (nodes, devices), ring)


def index_of(diagonals, num_blocks, block_size):
    """One head with some block diagonals and no columns."""
    diagonals = jnp.asarray(diagonals, jnp.int32)[None, None]
    return VerticalSlashIndex(
        diagonals, jnp.full((1, 1), diagonals.size, jnp.int32),
        jnp.zeros((1, 1, 0), jnp.int32), jnp.zeros((1, 1), jnp.int32), block_size,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["striped", "zigzag", "contiguous"])
@pytest.mark.parametrize("ring", ["flat", "hierarchical"])
def test_counts_are_those_of_the_mask(kind, ring):
    topology = topology_of(kind, 2, 2, ring)
    index = indices.sparse()
    found = tiles_per_step(index, topology)

    size = indices.BLOCK_SIZE
    no_columns = VerticalSlashIndex(
        index.slash_blocks, index.slash_count, index.vertical_tokens[..., :0],
        jnp.zeros_like(index.vertical_count), size,
    )  # fmt: skip
    mask = np.asarray(mask_from_index(no_columns, indices.SEQ_LEN))
    shape = (indices.NUM_BLOCKS, size, indices.NUM_BLOCKS, size)
    tiles = mask.reshape(*mask.shape[:2], *shape).any((3, 5)).sum((0, 1))

    blocks = [np.asarray(topology.layout.block_ids(rank)) for rank in range(4)]
    for rank, (node, device) in enumerate(np.ndindex(topology.outer_size, topology.inner_size)):
        for a in range(topology.outer_size):
            for b in range(topology.inner_size):
                source = topology.source(rank, a, b)
                expected = tiles[np.ix_(blocks[rank], blocks[source])].sum()
                assert found[node, device, a, b] == expected
    assert found.sum() == tiles.sum() > 0


def test_dense_has_all_causal_tiles():
    topology = topology_of("striped", 2, 4, "hierarchical")
    found = tiles_per_step(DenseIndex(indices.BLOCK_SIZE), topology)
    assert found.sum() == indices.NUM_BLOCKS * (indices.NUM_BLOCKS + 1) / 2


@pytest.mark.parametrize(
    ("nodes", "devices", "ring"), [(1, 8, "flat"), (2, 4, "hierarchical"), (4, 2, "hierarchical")]
)
def test_striped_is_balanced_where_zigzag_is_not(nodes, devices, ring):
    # The shape of real patterns: a band near the diagonal and a few far diagonals.
    num_blocks, block = 1024, 4
    rng = np.random.default_rng(0)
    far = np.sort(rng.choice(np.arange(8, num_blocks), 8, replace=False))
    index = index_of([*range(8), *far], num_blocks, block)

    def tiles(kind, **options):
        topology = topology_of(kind, nodes, devices, ring, num_blocks * block, block, **options)
        return tiles_per_step(index, topology)

    striped, zigzag = tiles("striped"), tiles("zigzag")
    assert layer_imbalance(striped) < 1.03 and step_imbalance(striped) < 1.03
    assert (imbalance_of_steps(striped) < 1.03).all()
    assert step_imbalance(zigzag) > 1.15 and imbalance_of_steps(zigzag).max() > 1.7
    if nodes > 1:
        # Without stripes over nodes, devices of a node work on two residues and wait.
        assert step_imbalance(tiles("striped", spread=False)) > 1.1


def test_gathering_is_one_step_a_node_with_the_work_of_a_turn():
    turned, gathered = (
        tiles_per_step(indices.sparse(), topology_of("striped", 2, 4, ring))
        for ring in ("hierarchical", "gather")
    )
    np.testing.assert_array_equal(gathered, turned.sum(-1, keepdims=True))
    assert gathered.shape == (2, 4, 2, 1)
    assert layer_imbalance(gathered) == layer_imbalance(turned)
    assert step_imbalance(gathered) <= step_imbalance(turned)


def test_a_flat_striped_ring_gives_equal_work_at_every_step():
    index = index_of([0, 1, 2, 3, 17, 101, 511], 1024, 4)
    found = tiles_per_step(index, topology_of("striped", 1, 8, "flat", 4096, 4))
    assert step_imbalance(found) < 1.02
    busy = found.sum((0, 1)) > 0
    assert (imbalance_of_steps(found)[busy] < 1.02).all()
    assert not imbalance_of_steps(found)[~busy].any() and not busy.all()
