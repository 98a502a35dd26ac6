import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import (
    Columns,
    DiagonalTiles,
    SegmentedDiagonals,
    VerticalSlashIndex,
    gather_columns,
    scatter_columns,
)
from pallas_kernels.index import Segment
from pallas_kernels.tiles import COLUMN_TILE, NO_DIAGONAL
from tests.pallas_kernels.helpers import brute_force, cases
from tests.pallas_kernels.helpers.cases import Size
from tests.pallas_kernels.helpers.properties import repeatable

row_lists = jax.jit(DiagonalTiles.row_lists, static_argnums=(1, 2))
column_lists = jax.jit(DiagonalTiles.column_lists, static_argnums=(1, 2))
run_lists = jax.jit(SegmentedDiagonals.row_lists, static_argnums=(1, 2))
run_columns = jax.jit(SegmentedDiagonals.column_lists, static_argnums=(1, 2))
gather = jax.jit(gather_columns)
scatter = jax.jit(scatter_columns)

seeds = st.integers(0, 2**32 - 1)
shard_lengths = st.sampled_from([(4, 4), (5, 2), (2, 5), (1, 3)])


@functools.partial(jax.jit, static_argnums=(2, 3))
def columns_of(index: VerticalSlashIndex, rank: int, ranks: int, num_blocks: int) -> Columns | None:
    return index.columns(Segment(rank, ranks, num_blocks // ranks), num_blocks)


def _tiles(seed: int, rows: int, columns: int) -> DiagonalTiles:
    rng = np.random.default_rng(seed)
    size = Size(1, 3, 1, rows, columns, block_size=4, dim=4)
    diagonal = int(rng.choice([0, 1, -1, NO_DIAGONAL]))
    return cases.diagonal_tiles(rng, size, capacity=9, diagonal=diagonal, garbage=rng)


@repeatable
@given(seeds, shard_lengths)
def test_ranges_are_the_valid_offsets_that_meet_a_block(seed, lengths):
    rows, columns = lengths
    tiles = _tiles(seed, rows, columns)
    blocks = brute_force.tile_blocks(tiles, rows, columns)
    for lists, of_rows in ((row_lists, True), (column_lists, False)):
        offsets, first, last = (np.asarray(x) for x in lists(tiles, rows, columns))
        assert first.dtype == last.dtype == np.int32
        for b, h, own in np.ndindex(*first.shape):
            assert 0 <= first[b, h, own] <= last[b, h, own] <= offsets.shape[-1]
            listed = offsets[b, h, first[b, h, own] : last[b, h, own]]
            others = own - listed if of_rows else own + listed
            expected = blocks[b, h, own] if of_rows else blocks[b, h, :, own]
            assert sorted(others.tolist()) == np.flatnonzero(expected).tolist()


@repeatable
@given(seeds, st.sampled_from([(4, 4, 2), (5, 2, 3), (2, 5, 1), (3, 4, 4)]))
def test_ranges_of_runs_match_single_segments(seed, lengths):
    rows, columns, segments = lengths
    parts = [_tiles(seed + n, rows, columns) for n in range(segments)]
    order = np.random.default_rng(seed).permutation(segments)[: max(segments - 1, 1)]
    capacity = parts[0].offsets.shape[-1]
    tiles = SegmentedDiagonals(
        jnp.concatenate([parts[n].offsets - n * columns for n in order], axis=-1),
        jnp.stack([parts[n].start + r * capacity for r, n in enumerate(order)], axis=-1),
        jnp.stack([parts[n].stop + r * capacity for r, n in enumerate(order)], axis=-1),
        jnp.asarray(order, jnp.int32),
        jnp.int32(NO_DIAGONAL),
        segments,
        4,
    )
    _, first, last = (np.asarray(x) for x in run_lists(tiles, rows, segments * columns))
    for run, n in enumerate(order):
        wanted = [np.asarray(x) + run * capacity for x in row_lists(parts[n], rows, columns)[1:]]
        _same_entries((first[:, :, run], last[:, :, run]), wanted)
    _, first, last = (np.asarray(x) for x in run_columns(tiles, rows, segments * columns))
    for n in range(segments):
        own = slice(n * columns, (n + 1) * columns)
        if n in order:
            run = order.tolist().index(n)
            wanted = column_lists(parts[n], rows, columns)[1:]
            wanted = [np.asarray(x) + run * capacity for x in wanted]
        else:
            wanted = [np.zeros((1, 3, columns), np.int32)] * 2
        _same_entries((first[..., own], last[..., own]), wanted)


def _same_entries(ranges, wanted):
    """Whether ranges are equal, ignoring the position of empty ones."""
    some = wanted[1] > wanted[0]
    np.testing.assert_array_equal(ranges[1] > ranges[0], some)
    for a, b in zip(ranges, wanted, strict=True):
        np.testing.assert_array_equal(a[some], b[some])


@pytest.mark.parametrize("lengths", [(3, 5), (5, 3), (4, 4)])
@pytest.mark.parametrize("causal", [True, False])
def test_full_tiles_list_every_block_once(lengths, causal):
    tiles = DiagonalTiles.full(2, 3, *lengths, block_size=4, causal=causal)
    blocks = brute_force.tile_blocks(tiles, *lengths)
    expected = np.tril(np.ones(lengths, bool)) if causal else np.ones(lengths, bool)
    np.testing.assert_array_equal(blocks, np.broadcast_to(expected, blocks.shape))
    pairs = brute_force.tile_mask(tiles, *lengths)
    every = np.ones((4 * lengths[0], 4 * lengths[1]), bool)
    np.testing.assert_array_equal(pairs[1, 2], np.tril(every) if causal else every)
    offsets = np.asarray(tiles.offsets)[0, 0]
    assert (np.diff(offsets) == 1).all()


def _index(seed: int, block_size: int = 4, blocks: int = 8) -> VerticalSlashIndex:
    rng = np.random.default_rng(seed)
    size = Size(1, 8, 2, blocks, blocks, block_size, dim=4)
    return cases.vertical_slash(rng, size, max_slashes=4, max_verticals=7, garbage=rng)


@repeatable
@given(seeds)
def test_diagonals_of_an_index_are_marked(seed):
    index = _index(seed)
    active = np.asarray(index.active_diagonals(8))
    for b, h in np.ndindex(*active.shape[:2]):
        live = np.asarray(index.slash_blocks)[b, h, : index.slash_count[b, h]]
        assert np.flatnonzero(active[b, h]).tolist() == live.tolist()


@repeatable
@given(seeds, st.sampled_from([(1, 0), (2, 0), (2, 1), (4, 3)]))
def test_columns_and_tiles_partition_the_pairs_of_an_index(seed, stripe):
    """Kept, causal columns are exactly the pairs that no tile computes; ranks stripe queries."""
    ranks, rank = stripe
    index = _index(seed)
    query_blocks = jnp.arange(rank, 8, ranks, dtype=jnp.int32)
    columns = columns_of(index, rank, ranks, 8)
    tokens, count = np.asarray(columns.tokens), np.asarray(index.vertical_count)
    words = np.asarray(columns.keep)
    assert words.dtype == np.uint32 and words.shape == (1, 8, 8 // ranks, COLUMN_TILE // 32)
    bits = (words[..., None] >> np.arange(32, dtype=np.uint32)) & 1
    keep = bits.reshape(*words.shape[:-1], COLUMN_TILE).astype(bool)
    no_verticals = VerticalSlashIndex(
        index.slash_blocks,
        index.slash_count,
        index.vertical_tokens[..., :0],
        jnp.zeros_like(index.vertical_count),
        index.block_size,
    )
    whole = brute_force.index_mask(index, 32)
    left = whole & ~brute_force.index_mask(no_verticals, 32)
    for b, h, i in np.ndindex(*keep.shape[:3]):
        live = tokens[b, h, : count[b, h]]
        assert live.tolist() == np.asarray(index.vertical_tokens)[b, h, : count[b, h]].tolist()
        assert not keep[b, h, i, count[b, h] :].any()
        kept = np.flatnonzero(keep[b, h, i])
        assert int(columns.limit[b, h, i]) == (kept[-1] + 1 if kept.size else 0)
        positions = int(query_blocks[i]) * 4 + np.arange(4)
        pairs = np.zeros((4, 32), bool)
        pairs[:, tokens[b, h, kept]] = tokens[b, h, kept] <= positions[:, None]
        np.testing.assert_array_equal(pairs, left[b, h, positions])


def test_padded_columns_are_past_every_query():
    index = _index(0)
    tokens, count = np.asarray(index.column_tokens()), np.asarray(index.vertical_count)
    assert tokens.shape == (1, 8, COLUMN_TILE) and tokens.dtype == np.int32
    padding = np.arange(COLUMN_TILE) >= count[..., None]
    assert (tokens[padding] == np.iinfo(np.int32).max).all()


def _positions(rng: np.random.Generator, length: int) -> np.ndarray:
    """Positions [2, 6, 5], unique per head, some outside [0, length)."""
    values = np.concatenate([np.arange(length), [-7, -1, length, length + 1, 2**31 - 1]])
    rows = [rng.choice(values, 5, replace=False) for _ in range(12)]
    return np.asarray(rows, np.int32).reshape(2, 6, 5)


@repeatable
@given(seeds)
def test_gather_takes_the_column_of_each_query_heads_group(seed):
    rng = np.random.default_rng(seed)
    x, tokens = rng.standard_normal((2, 10, 3, 4)).astype(np.float32), _positions(rng, 10)
    expected = np.zeros((2, 5, 6, 4), np.float32)
    for b, h, c in np.ndindex(*tokens.shape):
        if 0 <= tokens[b, h, c] < 10:
            expected[b, c, h] = x[b, tokens[b, h, c], h // 2]
    np.testing.assert_array_equal(gather(x, tokens), expected)


@repeatable
@given(seeds)
def test_scatter_is_the_transpose_of_gather(seed):
    rng = np.random.default_rng(seed)
    tokens = _positions(rng, 10)
    # Integers, so that the order of the sum over a group does not matter.
    target = rng.integers(-9, 9, (2, 10, 3, 4)).astype(np.float32)
    columns = rng.integers(-9, 9, (2, 5, 6, 4)).astype(np.float32)
    expected = target.copy()
    for b, h, c in np.ndindex(*tokens.shape):
        if 0 <= tokens[b, h, c] < 10:
            expected[b, tokens[b, h, c], h // 2] += columns[b, c, h]
    np.testing.assert_array_equal(scatter(target, columns, tokens), expected)
