import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pallas_kernels import (
    BlockMaskIndex,
    BlockSparseIndex,
    DenseIndex,
    VerticalSlashIndex,
    WindowIndex,
)
from pallas_kernels.index import Rows, bits
from tests.pallas_kernels.helpers import brute_force, cases
from tests.pallas_kernels.helpers.cases import Size
from tests.pallas_kernels.helpers.properties import repeatable

from_block_mask = jax.jit(
    BlockSparseIndex.from_block_mask, static_argnames=("block_size", "causal")
)


@repeatable
@given(
    st.sampled_from([(4, 4), (3, 6), (6, 3)]).flatmap(lambda shape: arrays(bool, (1, 2, *shape))),
    st.booleans(),
)
def test_block_lists_and_their_transpose_describe_the_mask(mask, causal):
    index = from_block_mask(mask, block_size=4, causal=causal)
    expected = np.tril(mask) if causal else mask
    _assert_lists(index.key_blocks, index.key_count, expected)
    _assert_lists(index.query_blocks, index.query_count, expected.swapaxes(-1, -2))
    assert (index.block_size, index.causal) == (4, causal)


def _assert_lists(lists, count, mask):
    """Checks that lists ascend without repeats and are padded past the last block."""
    lists, count = np.asarray(lists), np.asarray(count)
    assert lists.dtype == count.dtype == np.int32
    for at in np.ndindex(*count.shape):
        assert lists[at][: count[at]].tolist() == np.flatnonzero(mask[at]).tolist()
        assert (lists[at][count[at] :] == mask.shape[-1]).all()


SIZE, NUM_BLOCKS = 4, 8
SEQ_LEN = NUM_BLOCKS * SIZE


def vertical_slash_of(diagonals, verticals, garbage):
    """Two heads with full capacities: one with the given sets, one empty. Arbitrary padding."""

    def padded(entries, capacity):
        rest = [capacity + x for x in garbage][: capacity - len(entries)]
        rows = sorted(entries) + rest, rest
        return jnp.array([[x + [capacity] * (capacity - len(x)) for x in rows]], jnp.int32)

    return VerticalSlashIndex(
        padded(diagonals, NUM_BLOCKS),
        jnp.array([[len(diagonals), 0]], jnp.int32),
        padded(verticals, SEQ_LEN),
        jnp.array([[len(verticals), 0]], jnp.int32),
        SIZE,
        NUM_BLOCKS,
    )


@functools.partial(jax.jit, static_argnames="seq_len")
def answers(index, seq_len):
    pairs = index.computed_pairs(seq_len), index.executed_pairs(seq_len)
    return *pairs, index.to_mask(seq_len), index.pairs_of_rows()


def assert_answers_follow_the_mask(index):
    mask = brute_force.index_mask(index, SEQ_LEN)
    heads = mask.shape[:2]
    computed, executed, found, of_rows = jax.device_get(answers(index, SEQ_LEN))
    np.testing.assert_array_equal(computed, mask.sum((2, 3)))
    if of_rows is not None:
        by_row = mask.reshape(*heads, NUM_BLOCKS, -1).sum(-1)
        np.testing.assert_array_equal(of_rows, by_row)
    has_rows = isinstance(index, BlockMaskIndex) or getattr(index, "first", None) is not None
    assert (of_rows is not None) == has_rows
    # Computed without columns, in whole blocks; the rest in columns of a block's rows.
    blocks_only = mask
    if isinstance(index, VerticalSlashIndex):
        no_columns = dataclasses.replace(index, vertical_count=0 * index.vertical_count)
        blocks_only = brute_force.index_mask(no_columns, SEQ_LEN)
    if isinstance(index, BlockMaskIndex):
        no_columns = dataclasses.replace(index, column_marks=None)
        blocks_only = brute_force.index_mask(no_columns, SEQ_LEN)
    by_row = (NUM_BLOCKS, SIZE, SEQ_LEN)
    tiles = blocks_only.reshape(*heads, *by_row[:2], *by_row[:2]).any((3, 5)).sum((2, 3))
    columns = (mask & ~blocks_only).reshape(*heads, *by_row).any(3).sum((2, 3))
    np.testing.assert_array_equal(executed, tiles * SIZE**2 + columns * SIZE)
    np.testing.assert_array_equal(found, mask)


@repeatable
@given(
    st.sets(st.integers(0, NUM_BLOCKS - 1)), st.sets(st.integers(0, SEQ_LEN - 1)),
    st.lists(st.integers(0, 9), max_size=5),
)  # fmt: skip
def test_diagonals_and_columns_match_the_mask(diagonals, verticals, garbage):
    assert_answers_follow_the_mask(vertical_slash_of(diagonals, verticals, garbage))


@repeatable
@given(arrays(bool, (2, 2, NUM_BLOCKS, NUM_BLOCKS)), st.booleans(), st.integers(-3, 99))
def test_block_lists_match_the_mask(mask, causal, padding):
    index = from_block_mask(mask, block_size=SIZE, causal=causal)
    slots = jnp.arange(NUM_BLOCKS)
    dead = slots >= index.key_count[..., None]
    index = dataclasses.replace(index, key_blocks=jnp.where(dead, padding, index.key_blocks))
    assert_answers_follow_the_mask(index)


def test_masks_need_a_fitting_length():
    listed = vertical_slash_of({0, 2}, {5}, [])
    assert (DenseIndex(SIZE).to_mask(SEQ_LEN) == np.tri(SEQ_LEN, dtype=bool)).all()
    np.testing.assert_array_equal(listed.to_mask(), listed.to_mask(SEQ_LEN))
    with jax.numpy_rank_promotion("raise"):
        every, column = jnp.ones((1, 1, 3, 3), bool), jnp.zeros((1, 1, 1), jnp.int32)
        assert BlockSparseIndex.from_block_mask(every, SIZE).to_mask().sum() == 78
        dense = BlockMaskIndex.from_block_mask(every, SIZE).with_columns(column)
        assert dense.to_mask().sum() == 78
    for call, sentence in (
        (DenseIndex(SIZE).to_mask, r"pass to_mask\(seq_len=\.\.\.\)"),
        (lambda: listed.to_mask("x"), "seq_len='x' must be an integer"),
        (lambda: DenseIndex(SIZE).to_mask(33), "seq_len=33 is not a multiple of block_size=4"),
        (lambda: listed.to_mask(64), "seq_len=64, but the index has 32 tokens"),
        (lambda: listed.on_one_device(1, 64, 2, 64), "seq_len=64, but the index has 32 tokens"),
        (lambda: listed.shards(1, 2, 1, 4), "seq_len=16, but the index has 32 tokens"),
        (lambda: dense.to_mask(SEQ_LEN), "seq_len=32, but the index has 12 tokens"),
        (lambda: dense.with_columns(column[0]), r"tokens is int32 \[1, 1\]; expected integers"),
        (lambda: BlockMaskIndex.from_block_mask(every + 0, SIZE), r"mask is int32 \[1, 1, 3, 3\]"),
        (lambda: DenseIndex(SIZE).to_mask(2**17), r"\[1, 1, 131072, 131072\] would have"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()


def lists_of_bits(mask):
    index = BlockMaskIndex.from_block_mask(mask, SIZE)
    return index, index.on_one_device(
        *mask.shape[:1], mask.shape[-1] * SIZE, mask.shape[1], mask.shape[-1] * SIZE
    )[0]


@pytest.mark.parametrize("at_once", [1 << 28, 11000])
def test_bits_store_the_mask_and_their_lists_match_it(at_once, monkeypatch):
    monkeypatch.setattr(bits, "BYTES_AT_ONCE", at_once)  # 39 rows of 420, the last 9 of padding
    # Words that are full, empty, and cut by the end of the sequence.
    mask = np.random.default_rng(0).random((2, 3, 70, 70)) < np.linspace(0, 1, 70)[:, None]
    mask[0, 0], mask[1, 1], mask[1, 2, 64:] = True, False, True
    index, tiles = jax.jit(lambda mask: lists_of_bits(mask))(mask)
    mask = np.tril(mask)
    np.testing.assert_array_equal(brute_force.index_mask(index, 70 * SIZE)[..., ::4, ::4], mask)
    for lists, count, expected in (
        (tiles.key_blocks, tiles.key_count, mask),
        (tiles.query_blocks, tiles.query_count, mask.swapaxes(-1, -2)),
    ):
        lists, count = np.asarray(lists), np.asarray(count)
        for at in np.ndindex(*count.shape):
            assert lists[at][: count[at]].tolist() == np.flatnonzero(expected[at]).tolist()
    assert tiles.diagonal == 0 and index.known_seq_len() == 70 * SIZE
    np.testing.assert_array_equal(index.budgets()["blocks"], mask.sum((2, 3)))


@repeatable
@given(arrays(bool, (2, 2, NUM_BLOCKS, NUM_BLOCKS)))
def test_bits_match_the_mask(mask):
    assert_answers_follow_the_mask(BlockMaskIndex.from_block_mask(mask, SIZE))


@jax.jit
def bits_with_columns(mask, tokens, start):
    """The index; the combined answers of two halves with every second row; its tokens."""
    index = BlockMaskIndex.from_block_mask(mask, SIZE).with_columns(tokens).columns_from(start)

    def on_half(rows):
        own = BlockMaskIndex.from_block_mask(mask[:, :, rows], SIZE, rows)
        own = own.with_columns(tokens, rows).columns_from(start[:, :, rows])
        held = Rows(rows, lambda x: jax.lax.psum(x, "halves"))
        pairs = own.computed_pairs(SEQ_LEN, held), own.executed_pairs(SEQ_LEN, held)
        return own, *pairs, own.pairs_of_rows(held)

    halves = jnp.arange(NUM_BLOCKS, dtype=jnp.int32).reshape(-1, 2).T
    return index, jax.vmap(on_half, axis_name="halves")(halves), index.column_tokens()


@repeatable
@given(
    arrays(bool, (1, 2, NUM_BLOCKS, NUM_BLOCKS)),
    arrays(np.int32, (1, 2, 6), elements=st.integers(-2, SEQ_LEN + 2)),
    st.lists(st.booleans(), min_size=2 * NUM_BLOCKS, max_size=2 * NUM_BLOCKS),
)
def test_bits_with_columns_match_the_mask(mask, tokens, begins):
    # Rows see no column before the beginning of their document.
    rows = np.arange(NUM_BLOCKS, dtype=np.int32)
    start = np.maximum.accumulate(np.where(np.reshape(begins, (1, 2, -1)), rows, 0), axis=-1)
    found = jax.device_get(bits_with_columns(mask, tokens, start))
    index, (halves, *pairs, of_rows), listed = found
    seen = np.repeat(start, SIZE, -1)[..., None] <= np.repeat(rows, SIZE)
    expected = np.tril(brute_force.expand(mask, SIZE))
    for h in range(2):
        columns = sorted({x for x in tokens[0, h].tolist() if 0 <= x < SEQ_LEN})
        expected[0, h][:, columns] |= seen[0, h][:, columns]
        assert listed[0, h, : len(columns)].tolist() == columns
        assert (listed[0, h, len(columns) :] > SEQ_LEN).all()
        assert index.budgets()["columns"][0, h] == len(columns)
    np.testing.assert_array_equal(brute_force.index_mask(index, SEQ_LEN), np.tril(expected))
    assert_answers_follow_the_mask(index)
    for found, wanted in zip(pairs, answers(index, SEQ_LEN)[:2], strict=True):
        np.testing.assert_array_equal(found, np.broadcast_to(wanted, found.shape))
    whole = answers(index, SEQ_LEN)[3]
    np.testing.assert_array_equal(of_rows, np.stack([whole[:, :, ::2], whole[:, :, 1::2]]))
    for name in ("bits", "column_marks", "column_start"):
        whole = np.asarray(getattr(index, name))
        np.testing.assert_array_equal(getattr(halves, name)[1], whole[:, :, 1::2])


@pytest.mark.parametrize("causal", [True, False])
def test_dense_indices_match_the_mask(causal):
    assert_answers_follow_the_mask(DenseIndex(SIZE, causal))


def test_dense_documents_match_the_mask():
    size = Size(2, 2, 1, NUM_BLOCKS, NUM_BLOCKS, SIZE, dim=0)
    index = cases.dense_documents(size, [[1, 3, -1, 2], [NUM_BLOCKS]])
    assert_answers_follow_the_mask(index)
    held = Rows(jnp.array([6, 1]), None)
    of_rows = index.pairs_of_rows()
    np.testing.assert_array_equal(index.pairs_of_rows(held), of_rows[:, :, [6, 1]])
    # Restricted to other documents: pairs within one of each.
    other = cases.dense_documents(size, [[2, 1, 5], [-3, 4]])
    cut = index.within_documents(other.first[:, 0], other.end[:, 0])
    both = [brute_force.index_mask(x, SEQ_LEN) for x in (index, other)]
    np.testing.assert_array_equal(brute_force.index_mask(cut, SEQ_LEN), both[0] & both[1])
    with pytest.raises(ValueError, match="seq_len=64, but the index has 32 tokens"):
        index.computed_pairs(64)
    with pytest.raises(ValueError, match="index.first has shape .2, 2, 8.; expected .1, 2, 8."):
        index.on_one_device(1, SEQ_LEN, 2, SEQ_LEN)


@pytest.mark.parametrize("window", [1, 3, SIZE, SIZE + 1, 2 * SIZE, 13, 2 * SEQ_LEN])
def test_windows_match_the_mask(window):
    size = Size(2, 2, 1, NUM_BLOCKS, NUM_BLOCKS, SIZE, dim=0)
    documents = cases.dense_documents(size, [[1, 3, -1, 3], [NUM_BLOCKS]])
    index = WindowIndex.of_sequence(2, 2, NUM_BLOCKS, SIZE, window)
    cut = index.within_documents(documents.first[:, 0], documents.end[:, 0])
    assert_answers_follow_the_mask(cut)
    rows = jnp.array([6, 1])
    of_rows = cut.pairs_of_rows()[:, :, rows]
    np.testing.assert_array_equal(cut.pairs_of_rows(Rows(rows, None)), of_rows)


def test_bits_and_columns_are_restricted_to_documents():
    size = Size(2, 2, 1, NUM_BLOCKS, NUM_BLOCKS, SIZE, dim=0)
    documents = cases.dense_documents(size, [[2, 1, -1, 4], [NUM_BLOCKS]])
    first, end = documents.first[:, 0], documents.end[:, 0]
    rng = np.random.default_rng(0)
    mask = rng.random((2, 2, NUM_BLOCKS, NUM_BLOCKS)) < 0.5
    tokens = rng.integers(SEQ_LEN, size=(2, 2, 5)).astype(np.int32)
    rows = np.array([6, 1], np.int32)

    @jax.jit
    def cuts(mask, tokens, rows, first, end):
        index = BlockMaskIndex.from_block_mask(mask, SIZE).with_columns(tokens)
        start = jnp.full((2, 2, NUM_BLOCKS), 3)
        later = index.columns_from(start).within_documents(first, end)
        held = BlockMaskIndex.from_block_mask(mask[:, :, rows], SIZE, rows)
        held = held.with_columns(tokens, rows).within_documents(first, end, rows)
        return index, index.within_documents(first, end), later, held

    index, cut, later, held = cuts(mask, tokens, rows, first, end)
    both = [brute_force.index_mask(x, SEQ_LEN) for x in (index, documents)]
    np.testing.assert_array_equal(brute_force.index_mask(cut, SEQ_LEN), both[0] & both[1])
    assert (both[0] & ~both[1]).any() and (both[0] & both[1]).any()
    # A later start of columns is kept, and a subset of rows gives the same as all rows.
    np.testing.assert_array_equal(later.column_start, np.maximum(cut.column_start, 3))
    for name in ("bits", "column_marks", "column_start"):
        whole = np.asarray(getattr(cut, name))
        np.testing.assert_array_equal(getattr(held, name), whole[:, :, rows])


@pytest.mark.parametrize("make", [DenseIndex, functools.partial(cases.every_diagonal, 1, 1, 32)])
def test_an_index_that_cannot_be_restricted_to_documents_raises(make):
    index = make(SIZE)
    sentence = f"a {type(index).__name__} cannot be restricted to pairs within documents"
    with pytest.raises(NotImplementedError, match=sentence):
        index.within_documents(jnp.zeros((1, NUM_BLOCKS), int), jnp.full((1, NUM_BLOCKS), 8))


def test_counts_of_a_million_tokens_do_not_overflow():
    seq_len, size = 1 << 20, 128
    pairs = np.float32(seq_len * (seq_len + 1) // 2)
    tiles = np.float32(sum(range(1, seq_len // size + 1)) * size**2)
    count = jax.jit(lambda x: (x.computed_pairs(seq_len), x.executed_pairs(seq_len)))
    window = WindowIndex.of_sequence(1, 1, seq_len // size, size, seq_len)
    for index in (cases.every_diagonal(1, 1, seq_len, size), DenseIndex(size), window):
        assert [x.item() for x in count(index)] == [pairs, tiles]


@pytest.mark.parametrize(
    "make",
    [
        lambda: DenseIndex(4).computed_pairs(30),
        lambda: cases.every_diagonal(1, 1, 32, 4).executed_pairs(30),
    ],
)
def test_indices_need_whole_blocks(make):
    with pytest.raises(ValueError, match="seq_len=30 is not a multiple of block_size=4"):
        make()


def test_block_lists_of_another_length_raise():
    index = from_block_mask(np.ones((1, 1, 4, 4), bool), block_size=4)
    with pytest.raises(ValueError, match="seq_len=32, but the index has 16 tokens"):
        index.computed_pairs(32)


def test_bits_of_another_length_raise():
    index = BlockMaskIndex.from_block_mask(jnp.ones((1, 1, 4, 4), bool), SIZE)
    with pytest.raises(ValueError, match="seq_len=32, but the index has 16 tokens"):
        index.computed_pairs(32)
    with pytest.raises(ValueError, match="index.num_blocks=4 but there are 8 key blocks"):
        index.shards(1, 1, 1, 8)
    with pytest.raises(ValueError, match="index.bits has shape .1, 1, 4, 1.; .* .1, 1, 2, 1."):
        index.shards(1, 1, 2, 4, jnp.array([0, 2]))
    index = index.with_columns(jnp.zeros((1, 1, 1), jnp.int32), jnp.array([0, 2]))
    with pytest.raises(ValueError, match="index.column_marks has shape .1, 1, 2, 1.; .* .1, 1, 4,"):
        index.shards(1, 1, 1, 4)


def test_indices_pass_through_jit_and_scan_with_their_static_fields():
    index = cases.every_diagonal(1, 2, 8, 4)
    blocks = BlockSparseIndex.from_block_mask(jnp.ones((1, 2, 2, 2), bool), 4, causal=False)

    @jax.jit
    def through_scan(index):
        layers = jax.tree.map(lambda x: jnp.stack([x, x]), index)
        return jax.lax.scan(lambda carry, layer: (carry, layer), None, layers, 2)[1]

    for before in (index, blocks, DenseIndex(4, causal=False)):
        after = through_scan(before)
        assert type(after) is type(before)
        assert after.block_size == 4
        assert jax.tree.structure(after) == jax.tree.structure(before)
        same = jax.tree.map(lambda a, b: bool((a[0] == b).all()), after, before)
        assert all(jax.tree.leaves(same))
    assert functools.reduce(lambda n, x: n + x.size, jax.tree.leaves(blocks), 0) == 24
