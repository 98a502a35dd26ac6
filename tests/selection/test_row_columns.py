"""Columns in addition to block lists, against softmax in fp64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.documents import Documents
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.rules.row_rule import RowRule
from mtraining_jax.selection.scores import row_columns
from mtraining_jax.selection.scores.probe_rows import probe_rows
from mtraining_jax.selection.segments import sparse_segments
from tests.patterns import inputs, oracle

SIZE, NUM_BLOCKS, HEADS, DIM, COLUMNS, QUERIES = 8, 32, 3, 16, 10, 128
SEQ_LEN = SIZE * NUM_BLOCKS
RULE = RowRule(0.8, sink_blocks=1, local_blocks=2)


def weights_of(q, k, rows):
    """Softmax fp64 [Hq, rows, S] of some rows of one sequence."""
    q, k = np.asarray(q, np.float64)[0, rows], np.asarray(k, np.float64)[0, :, 0]
    logits = np.einsum("rhd,kd->hrk", q, k) * DIM**-0.5
    return oracle.softmax(np.where(np.arange(SEQ_LEN) <= rows[:, None], logits, -np.inf))


@pytest.fixture(scope="module")
def heads():
    return inputs.random(0, 1, SEQ_LEN, HEADS, 1, DIM)


@jax.jit
def heaviest(q, k, valid_len):
    documents = Documents.padded(valid_len, SEQ_LEN, SIZE)
    context = SelectionContext(jnp.arange(NUM_BLOCKS), NUM_BLOCKS, documents=documents)
    segments = sparse_segments(context, 1, SIZE)
    return row_columns.heaviest_columns(q, k, context, segments, COLUMNS, RULE)[:, :, 0]


@pytest.mark.parametrize("valid_len", [SEQ_LEN, SEQ_LEN - 3 * SIZE - 3])
def test_the_columns_are_the_heaviest_far_keys(heads, valid_len):
    q, k = heads
    keep = (np.arange(SEQ_LEN) < valid_len)[:, None, None]
    found = np.asarray(heaviest(jnp.where(keep, q, 9.0), jnp.where(keep, k, 9.0), valid_len))
    rows = np.arange(1, QUERIES + 1) * valid_len // QUERIES - 1
    key_blocks = np.arange(SEQ_LEN) // SIZE
    far = (rows[:, None] // SIZE - key_blocks >= 2) & (key_blocks >= 1)
    for head, weights in enumerate(weights_of(q, k, rows)):
        mass = np.where(far, weights, 0).sum(0)
        tokens = found[0, head]
        assert (np.diff(tokens) > 0).all() and tokens[-1] < valid_len
        others = np.delete(mass, tokens)
        assert mass[tokens].min() > others.max() - 1e-4


def test_too_few_keys_leave_padding(heads):
    q, k = heads
    tokens = np.asarray(heaviest(q, k, 4 * SIZE))
    assert set(tokens[0, 0].tolist()) <= {*range(SIZE, 2 * SIZE), SEQ_LEN}
    assert (tokens[0, :, -1] == SEQ_LEN).all()


def test_column_mass_is_excluded_from_block_mass(heads):
    q, k = heads
    blocks = np.array([6, 1, 31, 0], np.int32)  # blocks of a rank, in any order
    tokens = np.array([[3, 8, 60, 61, SEQ_LEN], [0] + [SEQ_LEN] * 4, [SEQ_LEN] * 5], np.int32)
    own = q.reshape(1, NUM_BLOCKS, SIZE, HEADS, DIM)[:, blocks].reshape(1, -1, HEADS, DIM)

    @jax.jit
    def masses(own, k):
        context = SelectionContext(jnp.asarray(blocks), NUM_BLOCKS)
        rows, places = probe_rows(own, context, 4)
        columns, segments = (jnp.asarray(tokens)[None, :, None], sparse_segments(context, 1, SIZE))
        found = row_columns.masses_without(rows, places, k, columns, segments, context, like=own)
        return *found, places

    left, beside, places = map(np.asarray, masses(own, k))
    for i, rows in enumerate(places[0]):
        for head, weights in enumerate(weights_of(q, k, rows)):
            listed = tokens[head][tokens[head] < SEQ_LEN]
            of_columns = weights[:, listed].sum(-1).mean()
            np.testing.assert_allclose(beside[0, head, i], of_columns, atol=2e-6)
            weights[:, listed] = 0
            expected = weights.reshape(4, NUM_BLOCKS, SIZE).sum(-1).mean(0)
            np.testing.assert_allclose(left[0, head, i], expected, atol=3e-6)
