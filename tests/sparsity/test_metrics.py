import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtraining_jax import sparsity
from pallas_kernels.index import VerticalSlashIndex
from tests.sparsity import inputs, oracle

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


@functools.partial(jax.jit, static_argnames="seq_len")
def measures(index, seq_len):
    return tuple(
        measure(index, seq_len)[0, 0]
        for measure in (sparsity.computed_pairs, sparsity.executed_pairs, sparsity.density)
    )


@settings(max_examples=60, deadline=None)
@given(
    diagonals=st.sets(st.integers(0, NUM_BLOCKS - 1)),
    verticals=st.sets(st.integers(0, SEQ_LEN - 1)),
)
def test_counts_are_those_of_the_mask(diagonals, verticals):
    mask = oracle.mask(diagonals, verticals, SEQ_LEN, SIZE)
    computed, executed, density = measures(index_of(diagonals, verticals), SEQ_LEN)
    assert computed == mask.sum()
    np.testing.assert_allclose(density, mask.sum() / sparsity.causal_pairs(SEQ_LEN), rtol=1e-6)
    tiles = sum(NUM_BLOCKS - d for d in diagonals) * SIZE**2
    for token in verticals:
        below = range(NUM_BLOCKS - token // SIZE)
        tiles += sum(d not in diagonals for d in below) * SIZE
    assert executed == tiles


def test_counts_of_a_million_tokens_do_not_overflow():
    seq_len, size = 1 << 20, 128
    index = VerticalSlashIndex.dense(1, 1, seq_len, size)
    computed, executed, density = measures(index, seq_len)
    assert computed == np.float32(sparsity.causal_pairs(seq_len))
    assert executed == np.float32(sum(range(1, seq_len // size + 1)) * size**2)
    np.testing.assert_allclose(density, 1.0, rtol=1e-6)


def test_flops_count_the_matrix_products():
    # Scores and output forward; scores, dv, dp, dq and dk backward; 2 D FLOP a pair each.
    assert sparsity.attention_flops(10, 64) == (2 * 2 * 64 * 10, 5 * 2 * 64 * 10)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_recall_is_the_share_of_softmax_mass_on_the_mask(dtype):
    seq_len, size, heads = 320, 16, 4
    num_blocks = seq_len // size
    q, k = inputs.random(0, 2, seq_len, heads, 2, 32, dtype)
    rng = np.random.default_rng(0)
    diagonals = [[{0, 1}, {3, 7, 19}], [set(), set(range(num_blocks))]]
    verticals = [[{0, 1, 2, 300}, set(rng.choice(seq_len, 30).tolist())], [{0, 319}, set()]]
    # Heads 2 and 3 get what heads 0 and 1 of the other batch entry have.
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
    recall = jax.jit(sparsity.attention_recall)(q, k, index, rows, block_ids=jnp.arange(num_blocks))
    logits = oracle.last_logits(q, k, seq_len, 32**-0.5)
    mass = oracle.softmax(logits)[:, :, rows]
    expected = np.zeros((2, heads))
    for b, h in np.ndindex(2, heads):
        mask = oracle.mask(diagonals[b][h], verticals[b][h], seq_len, size)
        expected[b, h] = (mass[b, h] * mask[rows]).sum(-1).mean()
    np.testing.assert_allclose(recall, expected, rtol=1e-5, atol=1e-6)
