import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.documents import Documents
from mtraining_jax.selection import metrics
from pallas_kernels.index import BlockSparseIndex, DenseIndex, VerticalSlashIndex
from tests.patterns import inputs, oracle

NUM_BLOCKS, SIZE = 8, 4
SEQ_LEN = NUM_BLOCKS * SIZE


def index_of(diagonals, verticals, num_blocks=NUM_BLOCKS, size=SIZE):
    """The index of one head, from sets, with full capacities."""

    def padded(entries, capacity):
        entries = sorted(entries)
        return jnp.array([[entries + [capacity] * (capacity - len(entries))]], jnp.int32)

    return VerticalSlashIndex(
        padded(diagonals, num_blocks),
        jnp.array([[len(diagonals)]], jnp.int32),
        padded(verticals, num_blocks * size),
        jnp.array([[len(verticals)]], jnp.int32),
        block_size=size,
    )


@pytest.mark.parametrize(("diagonals", "verticals"), [({0, 3}, {1, 2, 30}), (set(), set())])
def test_density_is_the_fraction_of_causal_pairs(diagonals, verticals):
    mask = oracle.mask(diagonals, verticals, SEQ_LEN, SIZE)
    density = jax.jit(metrics.density, static_argnums=1)(index_of(diagonals, verticals), SEQ_LEN)
    share = mask.sum() / metrics.causal_pairs(SEQ_LEN)
    np.testing.assert_allclose(density, [[share]], rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_recall_is_the_fraction_of_softmax_mass_on_the_mask(dtype):
    seq_len, size, heads = 320, 16, 4
    num_blocks = seq_len // size
    q, k = inputs.random(0, 2, seq_len, heads, 2, 32, dtype)
    rng = np.random.default_rng(0)
    diagonals = [[{0, 1}, {3, 7, 19}], [set(), set(range(num_blocks))]]
    verticals = [[{0, 1, 2, 300}, set(rng.choice(seq_len, 30).tolist())], [{0, 319}, set()]]
    # Heads 2 and 3 get the sets of heads 0 and 1 of the other batch entry.
    diagonals = [a + b for a, b in zip(diagonals, diagonals[::-1], strict=True)]
    verticals = [a + b for a, b in zip(verticals, verticals[::-1], strict=True)]
    rows = np.array([0, 5, 16, 33, 100, 257, 319])
    indices = [
        [index_of(diagonals[b][h], verticals[b][h], num_blocks, size) for h in range(heads)]
        for b in range(2)
    ]
    index = jax.tree.map(
        lambda *leaves: jnp.concatenate(leaves, 0),
        *[jax.tree.map(lambda *leaves: jnp.concatenate(leaves, 1), *row) for row in indices],
    )
    # The same pairs as block lists, without columns; and all pairs.
    mask = jnp.array([[oracle.mask(d, (), num_blocks, 1) for d in row] for row in diagonals])
    cases = {
        "diagonals and columns": (index, verticals),
        "block lists": (BlockSparseIndex.from_block_mask(mask, size), None),
        "all": (DenseIndex(size), None),
    }
    measure = jax.jit(metrics.attention_recall)
    logits = oracle.last_logits(q, k, seq_len, 32**-0.5)
    mass = oracle.softmax(logits)[:, :, rows]
    for name, (index, columns) in cases.items():
        recall = measure(q, k, index, rows, block_ids=jnp.arange(num_blocks))
        expected = np.zeros((2, heads))
        for b, h in np.ndindex(2, heads):
            listed = range(num_blocks) if name == "all" else diagonals[b][h]
            mask = oracle.mask(listed, columns[b][h] if columns else (), seq_len, size)
            expected[b, h] = (mass[b, h] * mask[rows]).sum(-1).mean()
        np.testing.assert_allclose(recall, expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_sequence_without_a_valid_row_has_recall_one():
    q, k = inputs.random(0, 2, 64, 1, 1, 16, jnp.float32)
    documents = Documents.from_lengths([[20], [64]], 64, 16)
    index = BlockSparseIndex.from_block_mask(
        jnp.broadcast_to(jnp.eye(4, dtype=bool), (2, 1, 4, 4)), 16
    )
    recall = jax.jit(metrics.attention_recall)(
        q, k, index, np.array([25, 40]), block_ids=jnp.arange(4), documents=documents
    )
    assert recall[0, 0] == 1 and 0 < recall[1, 0] < 0.9


def test_recall_of_a_non_causal_index_raises():
    q, k = inputs.random(0, 1, 32, 2, 1, 16, jnp.float32)
    with pytest.raises(ValueError, match="the index is not causal"):
        metrics.attention_recall(
            q, k, DenseIndex(16, causal=False), np.array([3]), block_ids=jnp.arange(2)
        )
