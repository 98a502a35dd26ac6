"""`Documents`: constructors, lookup by block, and what a program knows of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax import Dense, Documents, sparse_attention
from pallas_kernels.index import bits as sets

BLOCK, SEQ_LEN, NUM_BLOCKS = 8, 96, 12
# Two sequences: padding within documents' blocks and after the last document; no padding.
IDS = np.zeros((2, SEQ_LEN), np.int32)
IDS[0, :1], IDS[0, 8:25], IDS[0, 40:48] = 7, 3, 9
IDS[1] = 1
NONE = (12, 0, 0)
TABLE = [
    [(0, 1, 1), *[(1, 4, 17)] * 3, NONE, (5, 6, 8), *[NONE] * 6], [(0, 12, 96)] * NUM_BLOCKS
]  # fmt: skip


def table_of(documents):
    return np.stack([documents.first, documents.end, documents.tokens], axis=-1)


def test_documents_from_all_input_formats():
    found = Documents.from_segment_ids(IDS, BLOCK)
    np.testing.assert_array_equal(table_of(found), TABLE)
    offsets, lengths = [[0, 8, 40, 48], [0, 96]], [[1, 17, 8], [96]]
    by_offsets = Documents.from_cu_seqlens(offsets, SEQ_LEN, BLOCK, lengths)
    # Padding blocks between two documents do not belong to the first one.
    np.testing.assert_array_equal(table_of(by_offsets), TABLE)
    whole = Documents.from_cu_seqlens(np.array([0, 8, 32, 95]), SEQ_LEN, BLOCK)
    wanted = [(0, 1, 8), *[(1, 4, 24)] * 3, *[(4, 12, 63)] * 8]
    np.testing.assert_array_equal(table_of(whole), [wanted])
    packed = Documents.from_lengths([[1, 17, 8], []], SEQ_LEN, BLOCK)
    wanted = [(0, 1, 1), *[(1, 4, 17)] * 3, (4, 5, 8), *[NONE] * 7]
    np.testing.assert_array_equal(table_of(packed), [wanted, [NONE] * 12])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Documents.from_segment_ids([1] * 9 + [2] * 7, 8),
         r"segment_ids of sequence 0: document 1 begins at token 9, .* nearest: 8 and 16"),
        (lambda: Documents.from_segment_ids([1] * 8 + [2] * 8 + [1] * 8, 8),
         r"segment_ids\[0, 16\] = 1 appears a second time"),
        (lambda: Documents.from_segment_ids([1] * 8 + [0] * 8 + [1] * 8, 8), "a second time"),
        (lambda: Documents.from_segment_ids([1] * 9, 8), "seq_len=9 must be a multiple"),
        (lambda: Documents.from_segment_ids(np.ones(8), 8), r"segment_ids is float64 \[8\]"),
        (lambda: jax.jit(lambda x: Documents.from_segment_ids(x, 8))(np.ones(8, int)),
         "segment_ids is a traced array"),
        (lambda: Documents.from_cu_seqlens([0, 16, 8], 24, 8),
         r"cu_seqlens\[2\] = 8 of sequence 0 must be above cu_seqlens\[1\] = 16"),
        (lambda: Documents.from_cu_seqlens([0, 8, 8], 24, 8), r"cu_seqlens\[2\] = 8"),
        (lambda: Documents.from_cu_seqlens([8, 16], 24, 8), r"begins with \[8\]; the first entry"),
        (lambda: Documents.from_cu_seqlens([0, 12, 24], 24, 8),
         "document 1 begins at token 12, which must be a multiple of block_size=8"),
        (lambda: Documents.from_cu_seqlens([0, 8, 32], 24, 8),
         "document 1 ends at token 32, beyond the 24 tokens"),
        (lambda: Documents.from_cu_seqlens([0, 8], 24, 8, [9]), r"lengths of sequence 0 are \[9\]"),
        (lambda: Documents.from_cu_seqlens([[0, 8]], 24, 8, [[8], [8]]), "lengths has 2 sequences"),
        (lambda: Documents.from_segment_ids([[1] * 8 + [-1] * 8], 8),
         r"segment_ids\[0, 8\] = -1 is negative; .* 0 for padding"),
        (lambda: Documents.from_lengths([8, 8], 24, 8), r"lengths\[0\] is int64 \[\]; .* 1 axis"),
        (lambda: Documents.from_lengths([[8.5]], 24, 8), r"lengths\[0\] is float64 \[1\]"),
        (lambda: Documents.from_lengths([[8]], 24, 0), "block_size=0 must be an integer"),
        (lambda: Documents.from_lengths([[8]], 24.0, 8), "seq_len=24.0 must be an integer"),
        (lambda: Documents.from_lengths([[8, [8]]], 24, 8), r"lengths\[0\] is object \[2\]"),
        (lambda: Documents.from_cu_seqlens([], 24, 8), r"cu_seqlens=\[\] must be the offsets"),
        (lambda: Documents.from_lengths([[8]], 25, 8), "seq_len=25 must be a multiple of block"),
        (lambda: Documents.from_lengths([[8, 0]], 24, 8), "lengths: document 1 has 0 tokens"),
        (lambda: Documents.from_lengths([[8, 17]], 24, 8), "document 1 ends at token 25"),
    ],
)  # fmt: skip
def test_invalid_documents_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_document_of_each_block():
    rows = np.array([3, 0, 4, 11])

    @jax.jit
    def of_blocks(found):
        bits = sets.unpack(found.causal_blocks(rows, NUM_BLOCKS), NUM_BLOCKS)[:, 0]
        short, pairs = found.shorter_than(3), found.causal_pairs()
        return found, found.ends(), short, bits, pairs, found.contain(np.array([4, 2, 5]))

    found, ends, short, bits, pairs, contained = of_blocks(Documents.from_segment_ids(IDS, BLOCK))
    first = [0, 1, 1, 1, 12, 5, 12, 12, 12, 12, 12, 12]
    np.testing.assert_array_equal(found.first, [first, [0] * 12])
    np.testing.assert_array_equal(found.length[0], [1, 3, 3, 3, 0, 1] + [0] * 6)
    np.testing.assert_array_equal(ends[0], [1, 25, 25, 25, 0, 48] + [0] * 6)
    np.testing.assert_array_equal(short[0, :6], [1, 0, 0, 0, 1, 1])
    first = np.asarray(found.first)[:, rows, None]
    numbers = np.arange(NUM_BLOCKS)
    np.testing.assert_array_equal(bits, (numbers >= first) & (numbers <= rows[:, None]))
    assert np.asarray(bits).sum((1, 2)).tolist() == [4, 4 + 1 + 5 + 12]
    wanted = [sum(n * (n + 1) // 2 for n in (8, 24, 8)), 96 * 97 // 2]
    np.testing.assert_array_equal(pairs[:, 0], wanted)
    np.testing.assert_array_equal(
        contained[0, :6].astype(int),
        [[0, 0, 0], [0, 1, 0], [0, 1, 0], [0, 1, 0], [0, 0, 0], [0, 0, 1]],
    )


def test_positions_and_lengths_of_tokens_in_their_documents():
    blocks = np.array([3, 0, 4])
    packed = Documents.from_segment_ids(IDS, BLOCK)
    positions = np.asarray(packed.positions(blocks)).reshape(2, 3, BLOCK)
    np.testing.assert_array_equal(positions[0, :, 0], [16, 0, 0])
    np.testing.assert_array_equal(positions[1, :, -1], [31, 7, 39])
    assert not positions[0, 2].any()  # without a document
    lengths = np.asarray(packed.lengths(blocks)).reshape(2, 3, BLOCK)
    np.testing.assert_array_equal(lengths[:, :, 5], [[17, 1, 0], [96, 96, 96]])
    padded = Documents.padded(90, SEQ_LEN, BLOCK)
    np.testing.assert_array_equal(padded.positions(blocks), positions[1:].reshape(1, -1))
    np.testing.assert_array_equal(padded.lengths(blocks), np.full((1, 3 * BLOCK), 90))


@pytest.mark.parametrize("valid_len", [None, 90])
def test_boundaries_of_a_single_document_stay_constants_in_a_program(valid_len):
    known = []

    class Seen(Dense):
        def select(self, q, k, context):
            documents, blocks = context.documents, context.block_ids
            known.extend(isinstance(x, np.ndarray) for x in (documents.first, documents.end))
            known.append(context.first_blocks(blocks) is None)
            # Without padding, masks cost nothing.
            known.append((context.ends(blocks) is None) == (valid_len is None))
            return super().select(q, k, context)

    x = jnp.ones((1, SEQ_LEN, 1, 8))
    documents = None if valid_len is None else Documents.padded(valid_len, SEQ_LEN, BLOCK)
    attend = jax.jit(lambda x, own: sparse_attention(x, x, x, Seen(BLOCK), documents=own))
    attend.trace(x, documents)
    assert known == [True] * 4
