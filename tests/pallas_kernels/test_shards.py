"""The tiles of pairs of shards, for every type of index, against its mask."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.index import BlockMaskIndex, DenseIndex, Segment, VerticalSlashIndex
from pallas_kernels.tiles import NO_DIAGONAL
from pallas_kernels.work.items import QueryItem
from pallas_kernels.work.lists import Sizes
from pallas_kernels.work.query_work import query_work
from tests.pallas_kernels.helpers import cases
from tests.pallas_kernels.helpers.cases import Size

SIZE, BATCH, HEADS, NUM_BLOCKS, RANKS = 4, 2, 2, 16, 4


def vertical_slash(room=NUM_BLOCKS):
    """Diagonals only: some, none, all and the most distant."""
    rows = [[0, 1, 5, 8, 9, 15], [], range(NUM_BLOCKS), [15]]
    if not room:
        rows = [[]] * 4
    table = [[*row, *[NUM_BLOCKS] * (room - len(row))] for row in rows]
    return VerticalSlashIndex(
        jnp.array(table, jnp.int32).reshape(BATCH, HEADS, room),
        jnp.array([len(row) for row in rows], jnp.int32).reshape(BATCH, HEADS),
        jnp.zeros((BATCH, HEADS, 0), jnp.int32),
        jnp.zeros((BATCH, HEADS), jnp.int32),
        SIZE,
    )


def block_mask():
    mask = np.random.default_rng(0).random((BATCH, HEADS, NUM_BLOCKS, NUM_BLOCKS)) < 0.4
    mask[0, 0] = False
    mask[0, 1] = True
    return jnp.asarray(mask)


@functools.cache
def block_sparse():
    return cases.lists_of_mask(block_mask(), SIZE)


def documents():
    size = Size(BATCH, HEADS, 1, NUM_BLOCKS, NUM_BLOCKS, SIZE, dim=0)
    return cases.dense_documents(size, [[5, 1, 1, 6, -2, 1], [3, 13]])


INDICES = {
    "vertical_slash": vertical_slash, "no room": functools.partial(vertical_slash, 0),
    "dense": functools.partial(DenseIndex, SIZE), "block_sparse": block_sparse,
    "bits": lambda: cases.bits_of_mask(block_mask(), SIZE), "documents": documents,
}  # fmt: skip


@functools.cache
def blocks_of(name):
    """Bool [B, Hq, NB, NB]: the tiles of the whole sequence."""
    every = np.arange(NUM_BLOCKS)
    tiles = jax.jit(lambda index: index.computes(every * SIZE, every))(INDICES[name]())
    tiles = np.asarray(tiles)[..., 0]
    tiles = np.broadcast_to(tiles, (BATCH, HEADS, NUM_BLOCKS, NUM_BLOCKS))
    return np.tril(tiles)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def lists(tiles, num_rows, num_columns, by_rows):
    return (tiles.row_lists if by_rows else tiles.column_lists)(num_rows, num_columns)


def visits(tiles, num_rows, num_columns, by_rows):
    """How often each tile is computed and masked, int [B, Hq, rows, columns], by either list."""
    tiles = jax.device_get(tiles)
    entries, first, last = jax.device_get(lists(tiles, num_rows, num_columns, by_rows))
    if first.ndim == 3:
        first, last = first[:, :, None], last[:, :, None]
    computed = np.zeros((BATCH, HEADS, num_rows, num_columns), int)
    masked = np.zeros_like(computed)
    for b, h, run, own in np.ndindex(*first.shape):
        listed = entries[b, h, own] if tiles.listed else entries[b, h]
        for slot in range(first[b, h, run, own], last[b, h, run, own]):
            if tiles.listed:
                other = listed[slot]
            else:
                other = own - listed[slot] if by_rows else own + listed[slot]
            at = (b, h, own, other) if by_rows else (b, h, other, own)
            computed[at] += 1
            if own - other == (1 if by_rows else -1) * tiles.diagonal:
                masked[at] += 1
                # Where kernels expect it: at the end of a query block's own list, else first.
                at_end = tiles.listed and by_rows
                assert slot == (last[b, h, run, own] - 1 if at_end else first[b, h, run, own])
    return computed, masked


@functools.partial(jax.jit, static_argnums=1)
def items(tiles, sizes):
    return query_work(tiles, None, sizes).items


def check_items(tiles, num_rows, num_columns, expected):
    """Each row's item has as many key blocks as expected, int [B, Hq, rows], from the first on."""
    found = items(tiles, Sizes(BATCH, HEADS, num_rows, num_columns, HEADS))
    item = QueryItem(*np.asarray(found).T)
    assert len({*zip(item.batch, item.head, item.block, strict=True)}) == expected.size
    np.testing.assert_array_equal(item.tiles, expected[item.batch, item.head, item.block])
    _, first, last = jax.device_get(lists(tiles, num_rows, num_columns, True))
    if first.ndim == 4:  # several runs; the first may be empty
        run = np.argmax(last > first, axis=2)[:, :, None]
        first = np.take_along_axis(first, run, axis=2)[:, :, 0]
    filled = item.tiles > 0
    np.testing.assert_array_equal(item.first[filled], first[tuple(x[filled] for x in item[:3])])


def segments_of(kind):
    """The segments of all ranks of a layout."""
    count = NUM_BLOCKS // RANKS
    if kind == "striped":
        return [Segment(rank, RANKS, count) for rank in range(RANKS)]
    if kind == "zigzag":
        return [Segment(first, 1, count // 2) for first in range(0, NUM_BLOCKS, count // 2)]
    # Chunks of ranks against those of nodes with two ranks.
    return [Segment(first, 1, count) for first in range(0, NUM_BLOCKS, count)]


def prepared(index, stride):
    return index.shards(BATCH, HEADS, stride, NUM_BLOCKS)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in INDICES
        for kind in ("striped", "zigzag", "contiguous")
        # Zigzags of bits are covered by the tests of the ring.
        if (name, kind) != ("bits", "zigzag")
    ],
)
def test_tiles_of_all_pairs_of_segments_match_the_index(name, kind):
    index, segments = INDICES[name](), segments_of(kind)
    stride = segments[0].stride
    keys = segments
    if kind == "contiguous":
        keys = [Segment(x.first_block, 1, 2 * x.num_blocks) for x in segments[::2]]

    @jax.jit
    def pair_of(index, query_block, key_block):  # one program, as for the ranks of a ring
        query = segments[0]._replace(first_block=query_block)
        key = keys[0]._replace(first_block=key_block)
        return prepared(index, stride).pair(query, key)

    pairs = [[pair_of(index, q.first_block, k.first_block) for k in keys] for q in segments]
    for by_rows in (True, False):
        computed, masked = np.zeros((2, BATCH, HEADS, NUM_BLOCKS, NUM_BLOCKS), int)
        for (q, row), (k, at) in itertools.product(
            zip(segments, pairs, strict=True), zip(keys, range(len(keys)), strict=True)
        ):
            where = np.ix_(range(BATCH), range(HEADS), q.blocks(), k.blocks())
            found = visits(row[at], q.num_blocks, k.num_blocks, by_rows)
            computed[where] += found[0]
            masked[where] += found[1]
        wanted = blocks_of(name)
        np.testing.assert_array_equal(computed, wanted)
        np.testing.assert_array_equal(masked, wanted & np.eye(NUM_BLOCKS, dtype=bool))


@pytest.mark.parametrize("skip_own", [False, True])
@pytest.mark.parametrize("name", INDICES)
def test_tiles_of_concatenated_stripes_match_the_index(name, skip_own):
    index, segments = INDICES[name](), segments_of("striped")
    ranks = jnp.array([2, 0, 3])  # includes the keys of rank 0, not of rank 1

    @jax.jit
    def tiles_of(rank):
        query = Segment(rank, RANKS, NUM_BLOCKS // RANKS)
        if name == "bits":  # a rank holds the rows of its own blocks
            rows = query.blocks()
            own = BlockMaskIndex.from_block_mask(block_mask()[:, :, rows], SIZE, rows)
            assert own.bits.shape == (BATCH, HEADS, NUM_BLOCKS // RANKS, 1)
            of_rank = own.shards(BATCH, HEADS, RANKS, NUM_BLOCKS, rows)
            return of_rank.gathered(query, ranks, skip_own)
        return prepared(index, RANKS).gathered(query, ranks, skip_own)

    wanted = blocks_of(name)
    for rank in (0, 1) if not skip_own else (0,):
        query, tiles = segments[rank], tiles_of(rank)
        keys = np.concatenate([segments[other].blocks() for other in (2, 0, 3)])
        where = np.ix_(range(BATCH), range(HEADS), query.blocks(), keys)
        expected = wanted[where].copy()
        on_diagonal = np.asarray(query.blocks())[:, None] == keys
        if skip_own:
            expected &= ~np.isin(keys, query.blocks())
        for by_rows in (True, False):
            computed, masked = visits(tiles, query.num_blocks, keys.size, by_rows)
            np.testing.assert_array_equal(computed, expected)
            np.testing.assert_array_equal(masked, expected & on_diagonal)
        check_items(tiles, query.num_blocks, keys.size, expected.sum(-1))
        assert skip_own == (tiles.diagonal == NO_DIAGONAL) or rank == 1


def test_lists_of_a_shard_have_at_most_its_number_of_blocks():
    segments = segments_of("striped")
    pair = jax.jit(lambda index: prepared(index, RANKS).pair(segments[1], segments[0]))
    tiles = pair(block_sparse())
    assert tiles.key_blocks.shape == tiles.query_blocks.shape == (BATCH, HEADS, 4, 4)


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        (vertical_slash, "index.slash_count has shape .2, 2.; expected .3, 2."),
        (block_sparse, "index.key_count has shape .2, 2, 16.; expected .3, 2, 16."),
    ],
)
def test_an_index_of_another_batch_raises(index, sentence):
    with pytest.raises(ValueError, match=sentence):
        index().shards(3, HEADS, 1, NUM_BLOCKS)


def test_columns_exist_if_there_is_capacity_for_them():
    index = vertical_slash()
    assert index.column_tokens() is None and index.columns(Segment(0, 1, 4), NUM_BLOCKS) is None
    for other in (DenseIndex(SIZE), block_sparse()):
        assert other.column_tokens() is None and other.columns(Segment(0, 1, 4), 16) is None
    tokens = jnp.full((BATCH, HEADS, 3), 5, jnp.int32)
    index = dataclasses.replace(index, vertical_tokens=tokens)
    columns = index.columns(Segment(1, 4, 4), NUM_BLOCKS)
    assert columns.query_blocks.tolist() == [1, 5, 9, 13]
    assert index.column_tokens().shape == columns.tokens.shape == (BATCH, HEADS, 128)
