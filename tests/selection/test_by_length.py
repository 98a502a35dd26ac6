"""Pairs by document length: against a loop, on one device and over ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.data.balance import length_classes, num_classes
from mtraining_jax.documents import Documents
from mtraining_jax.selection.by_length import pairs_by_length, take_pairs_by_length
from mtraining_jax.utils.errors import UserError
from pallas_kernels.index import BlockMaskIndex, DenseIndex, Rows

G, NB, LENGTHS = 4, 16, [[3, 21, 9, 24], [64]]


def pairs_in_a_loop(mask):
    """Fractions of a sequence's pairs, [K, B, Hq], from the mask of blocks."""
    found = np.zeros((num_classes(NB), *mask.shape[:2]))
    for b, own in enumerate(LENGTHS):
        first = 0
        for length in own:
            end = first - (-length // G)
            for row in range(first, end):
                blocks = mask[b, :, row, first : row + 1]
                pairs = blocks[:, :-1].sum(-1) * G * G + blocks[:, -1] * G * (G + 1) // 2
                found[int(length_classes(length, G)), b] += pairs
            first = end
    return found / (NB * G * (NB * G + 1) / 2)


def test_pairs_by_length_on_one_device_and_over_ranks():
    documents = Documents.from_lengths(LENGTHS, NB * G, G)
    mask = np.random.default_rng(0).random((2, 3, NB, NB)) < 0.6
    blocks = jnp.asarray(mask)
    inside = documents.causal_blocks(jnp.arange(NB), NB)

    def of(rows, total):
        index = BlockMaskIndex.from_block_mask(blocks[:, :, rows], G, rows)
        own = inside[:, :, rows] & index.bits
        index = BlockMaskIndex(own, NB, G)
        found = pairs_by_length(index, Rows(rows, total), documents, NB * G)
        return jnp.stack(list(found.values()))

    expected = pairs_in_a_loop(mask)
    alone = jax.jit(lambda: of(jnp.arange(NB), lambda x: x))()
    np.testing.assert_allclose(alone, expected, rtol=1e-6)
    stripes = jnp.arange(NB).reshape(-1, 4).T
    total = lambda x: jax.lax.psum(x, "ranks")  # noqa: E731
    ranks = jax.jit(jax.vmap(lambda rows: of(rows, total), axis_name="ranks"))(stripes)
    for found in ranks:  # bit-identical: integer sums
        np.testing.assert_array_equal(found, alone)


def test_pair_counts_may_exceed_an_int32():
    seq_len, size = 131072, 2048
    documents = Documents.from_lengths([[seq_len // 4, seq_len // 2]], seq_len, size)

    @jax.jit
    def counted(documents):
        rows = Rows(jnp.arange(seq_len // size), lambda x: x)
        mask = jnp.ones((1, 1, seq_len // size, seq_len // size), bool)
        inside = documents.causal_blocks(rows.blocks, seq_len // size)
        index = BlockMaskIndex(
            BlockMaskIndex.from_block_mask(mask, size).bits & inside, seq_len // size, size
        )
        return pairs_by_length(index, rows, documents, seq_len)

    found = counted(documents)
    assert [float(found[f"pairs_of_length_class_{k}"][0, 0]) for k in range(7)] == pytest.approx(
        [0, 0, 0, 0, 1 / 16, 1 / 4, 0], rel=1e-4
    )


def test_statistics_are_extracted_by_class():
    layers = {f"pairs_of_length_class_{k}": np.array([k, k + 2.0]) for k in (10, 2, 0, 1)}
    layers["density"] = np.ones(2)
    assert take_pairs_by_length(layers).tolist() == [1, 2, 3, 11]
    assert list(layers) == ["density"] and take_pairs_by_length(layers) is None


def test_an_index_without_row_counts_raises():
    documents = Documents.from_lengths(LENGTHS, NB * G, G)
    rows = Rows(jnp.arange(NB), lambda x: x)
    with pytest.raises(UserError, match='cannot be measured with a DenseIndex: data.balance = "le'):
        pairs_by_length(DenseIndex(G), rows, documents, NB * G)
