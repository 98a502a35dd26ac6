import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.ring.balance import ring_balance
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


def balance_of(index, topology):
    """By one program, as NumPy arrays."""
    return jax.device_get(jax.jit(ring_balance, static_argnums=1)(index, topology))


@pytest.mark.parametrize("kind", ["striped", "zigzag"])
def test_lists_of_rows_count_for_the_rank_that_holds_them(kind):
    topology = topology_of(kind, 2, 2, "gather")
    balance = balance_of(indices.bits(), topology)
    listed = np.tril(np.asarray(indices.block_mask())).sum((0, 1))
    blocks = [np.asarray(topology.layout.block_ids(rank)) for rank in range(4)]
    for rank in range(4):
        for step in range(2):
            keys = np.concatenate([blocks[x] for x in topology.node_ranks(rank, step)])
            expected = listed[np.ix_(blocks[rank], keys)].sum()
            assert balance.tiles[*divmod(rank, 2), step, 0] == expected
    assert balance.tiles.shape == (2, 2, 2, 1) and balance.columns.sum() == 0


@pytest.mark.parametrize("kind", ["striped", "zigzag", "contiguous"])
@pytest.mark.parametrize("ring", ["flat", "hierarchical"])
def test_counts_are_those_of_the_mask(kind, ring):
    topology = topology_of(kind, 2, 2, ring)
    index = indices.sparse()
    balance = balance_of(index, topology)

    size = indices.BLOCK_SIZE
    no_columns = VerticalSlashIndex(
        index.slash_blocks, index.slash_count, index.vertical_tokens[..., :0],
        jnp.zeros_like(index.vertical_count), size,
    )  # fmt: skip
    whole, diagonal = (
        np.asarray(mask_from_index(x, indices.SEQ_LEN)) for x in (index, no_columns)
    )
    shape = (indices.NUM_BLOCKS, size, indices.NUM_BLOCKS, size)
    tiles = diagonal.reshape(*diagonal.shape[:2], *shape).any((3, 5)).sum((0, 1))
    column_tiles = (whole & ~diagonal).reshape(*whole.shape[:2], *shape).any(3).sum((0, 1, 3, 4))

    blocks = [np.asarray(topology.layout.block_ids(rank)) for rank in range(4)]
    for rank, (node, device) in enumerate(np.ndindex(topology.outer_size, topology.inner_size)):
        assert balance.columns[node, device] == column_tiles[blocks[rank]].sum()
        for a in range(topology.outer_size):
            for b in range(topology.inner_size):
                source = topology.source(rank, a, b)
                expected = tiles[np.ix_(blocks[rank], blocks[source])].sum()
                assert balance.tiles[node, device, a, b] == expected
    assert balance.tiles.sum() == tiles.sum() > 0 and balance.columns.sum() > 0


def test_dense_has_all_causal_tiles():
    topology = topology_of("striped", 2, 4, "hierarchical")
    balance = balance_of(DenseIndex(indices.BLOCK_SIZE), topology)
    assert balance.tiles.sum() == indices.NUM_BLOCKS * (indices.NUM_BLOCKS + 1) / 2
    assert not balance.columns.any() and balance.column_imbalance == 0


@pytest.mark.parametrize(
    ("nodes", "devices", "ring"), [(1, 8, "flat"), (2, 4, "hierarchical"), (4, 2, "hierarchical")]
)
def test_striped_is_balanced_where_zigzag_is_not(nodes, devices, ring):
    # The shape of real patterns: a band near the diagonal and a few far diagonals.
    num_blocks, block = 1024, 4
    rng = np.random.default_rng(0)
    far = np.sort(rng.choice(np.arange(8, num_blocks), 8, replace=False))
    index = index_of([*range(8), *far], num_blocks, block)

    def balance(kind, **options):
        topology = topology_of(kind, nodes, devices, ring, num_blocks * block, block, **options)
        return balance_of(index, topology)

    striped, zigzag = balance("striped"), balance("zigzag")
    assert striped.imbalance < 1.03 and striped.step_imbalance < 1.03
    assert (striped.per_step < 1.03).all()
    assert zigzag.step_imbalance > 1.15 and zigzag.per_step.max() > 1.7
    if nodes > 1:
        # Without stripes over nodes, devices of a node work on two residues and wait.
        assert balance("striped", spread=False).step_imbalance > 1.1


def test_gathering_is_one_step_a_node_with_the_work_of_a_turn():
    turned, gathered = (
        balance_of(indices.sparse(), topology_of("striped", 2, 4, ring))
        for ring in ("hierarchical", "gather")
    )
    np.testing.assert_array_equal(gathered.tiles, turned.tiles.sum(-1, keepdims=True))
    assert gathered.tiles.shape == (2, 4, 2, 1) and gathered.imbalance == turned.imbalance
    assert gathered.step_imbalance <= turned.step_imbalance


def test_a_flat_striped_ring_gives_equal_work_at_every_step():
    index = index_of([0, 1, 2, 3, 17, 101, 511], 1024, 4)
    balance = balance_of(index, topology_of("striped", 1, 8, "flat", 4096, 4))
    assert balance.step_imbalance < 1.02
    busy = np.asarray(balance.tiles.sum((0, 1))) > 0
    assert (np.asarray(balance.per_step)[busy] < 1.02).all()
    assert not np.asarray(balance.per_step)[~busy].any() and not busy.all()
