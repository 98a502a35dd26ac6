"""The order of the row kernels' items, and their assignment to thread blocks."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Columns, DiagonalTiles
from pallas_kernels.tiles import COLUMN_TILE, Tiles
from pallas_kernels.work.items import KEY_COLUMNS, KeyItem, QueryItem
from pallas_kernels.work.key_work import PARTS, KeyWork, join_parts, key_work
from pallas_kernels.work.lists import Sizes
from pallas_kernels.work.query_work import (
    CACHED_BLOCKS,
    LONGEST,
    SMALL_GROUP,
    QueryWork,
    assigned_item,
    query_work,
)
from tests.pallas_kernels.helpers import cases
from tests.pallas_kernels.helpers.cases import Size


@functools.cache
def _items(blocks: int, dense: bool = True) -> tuple[Size, np.ndarray]:
    size = Size(2, 6, 3, blocks, blocks, block_size=128, dim=8)
    tiles = DiagonalTiles.full(size.batch, size.heads, blocks, blocks, 128, causal=True)
    columns = None
    if not dense:
        rng = np.random.default_rng(0)
        index = cases.vertical_slash(rng, size, max_slashes=9, max_verticals=400)
        tiles, columns = cases.tiles_and_columns(index, size)
    work = _query_work(tiles, columns, size)
    return size, np.asarray(work.items)


@functools.partial(jax.jit, static_argnames="size")
def _query_work(tiles: Tiles | None, columns: Columns | None, size: Size) -> QueryWork:
    return query_work(tiles, columns, _sizes(size))


@functools.partial(jax.jit, static_argnames="size")
def _key_work(tiles: Tiles | None, columns: Columns | None, size: Size) -> KeyWork:
    return key_work(tiles, columns, _sizes(size))


def _sizes(size: Size) -> Sizes:
    return Sizes(size.batch, size.heads, size.query_blocks, size.key_blocks, size.kv_heads)


def _work(items: np.ndarray) -> np.ndarray:
    return _fields(items).steps


def _fields(items: np.ndarray) -> QueryItem:
    return QueryItem(*items.T[: len(QueryItem._fields)])


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("blocks", [24, CACHED_BLOCKS])
def test_every_block_of_every_head_is_one_item(blocks, dense):
    size, items = _items(blocks, dense)
    of = _fields(items)
    own = np.stack([of.batch, of.head, of.block], axis=1)
    assert len(np.unique(own, axis=0)) == len(own) == size.batch * size.heads * blocks


@pytest.mark.parametrize("dense", [True, False])
def test_items_of_a_short_sequence_descend_in_work(dense):
    _, items = _items(24, dense)
    assert (np.diff(_work(items)) <= 0).all()


@pytest.mark.parametrize("dense", [True, False])
def test_items_of_a_long_sequence_are_grouped_by_key_head_in_alternating_order(dense):
    size, items = _items(CACHED_BLOCKS, dense)
    parts = size.batch * size.kv_heads
    group = size.heads // size.kv_heads
    key_head = _fields(items).batch * size.kv_heads + _fields(items).head // group
    assert (key_head.reshape(parts, -1) == np.arange(parts)[:, None]).all()
    steps = np.diff(_work(items).reshape(parts, -1), axis=1)
    assert (steps[1::2] <= 0).all()
    assert (steps[0::2] >= 0).all()


@pytest.mark.parametrize(("blocks", "together"), [(CACHED_BLOCKS, 1), (100, 2)])
def test_lists_begin_with_the_longest_then_go_by_heads_that_fit_into_the_cache(blocks, together):
    size = Size(2, 6, 3, blocks, blocks, block_size=128, dim=8)
    index = cases.block_sparse(np.random.default_rng(0), size, causal=True)
    items = np.asarray(_query_work(index.tiles(), None, size).items)
    work, long = _work(items), _work(items) > LONGEST * _work(items).sum()
    assert 0 < long.sum() < len(items) and long[: long.sum()].all()
    assert (np.diff(work[long]) <= 0).all()
    of, group = _fields(items[~long]), size.heads // size.kv_heads
    part = (of.batch * size.kv_heads + of.head // group) // together
    assert (np.diff(part) >= 0).all()
    falling = [np.diff(work[~long][part == n]).mean() < 0 for n in range(6 // together)]
    assert falling[::-1] == [n % 2 == 0 for n in range(6 // together)]


@pytest.mark.parametrize("group", [1, SMALL_GROUP, 2 * SMALL_GROUP])
def test_key_heads_of_small_groups_go_as_they_fit_into_the_cache(group):
    """With blocks of all heads of a batch at once, keys would come from memory."""
    batch, heads, blocks = 4, 8, CACHED_BLOCKS // 2
    size = Size(batch, heads, heads // group, blocks, blocks, block_size=128, dim=8)
    tiles = DiagonalTiles.full(batch, heads, blocks, blocks, 128, causal=True)
    of = _fields(np.asarray(_query_work(tiles, None, size).items))
    pairs = (of.batch * heads + of.head) // (2 * group)  # of key heads
    assert (np.diff(pairs) >= 0).all() == (group <= SMALL_GROUP)


def _assigned(block, num_items, num_blocks):
    numbers = (int(assigned_item(n, jnp.int32(block), num_blocks)) for n in itertools.count())
    return list(itertools.takewhile(lambda number: number < num_items, numbers))


@pytest.mark.parametrize(("num_items", "num_blocks"), [(1, 1), (5, 5), (7, 3), (8, 3), (96, 10)])
def test_every_item_is_assigned_to_one_block(num_items, num_blocks):
    assigned = [_assigned(block, num_items, num_blocks) for block in range(num_blocks)]
    assert sorted(sum(assigned, [])) == list(range(num_items))


@pytest.mark.parametrize("blocks", [24, CACHED_BLOCKS])
def test_thread_blocks_get_equal_work_and_advance_in_step(blocks):
    _, items = _items(blocks)
    work, num_blocks = _work(items), 20
    ends = [np.cumsum(work[_assigned(block, len(work), num_blocks)]) for block in range(num_blocks)]
    rounds = min(len(x) for x in ends)
    apart = np.ptp([x[:rounds] for x in ends], axis=0)
    assert apart.max() <= work.max() / 4
    total = [x[-1] for x in ends]
    assert max(total) <= 1.01 * np.mean(total)


def test_column_tiles_of_other_documents_are_skipped():
    blocks, documents = 32, 8
    size = Size(1, 2, 1, blocks, blocks, block_size=128, dim=8)
    index = cases.documents_of_columns(size, documents=documents)
    tiles, columns = cases.tiles_and_columns(index, size)
    whole = dataclasses.replace(columns, first=None, ends=None)

    def walked(columns):
        rows, keys = _query_work(tiles, columns, size), _key_work(tiles, columns, size)
        of_keys = KeyItem(*np.asarray(keys.items).T)
        return _fields(np.asarray(rows.items)), of_keys, rows.skips_columns, keys.ends

    rows, keys, *skips = walked(columns)
    assert all(skips) and not any(walked(whole)[2:])
    kept = (
        np.unpackbits(np.asarray(columns.keep).view(np.uint8), axis=-1, bitorder="little")
        .reshape(2, blocks, -1, COLUMN_TILE)
        .any(-1)
    )
    for head, row, first, end, past in zip(
        rows.head,
        rows.block,
        rows.first_column_tile,
        rows.column_tiles,
        rows.past_tiles,
        strict=True,
    ):
        own = np.flatnonzero(kept[head, row])
        assert (first, end) == (own[0], own[-1] + 1) if own.size else first == end == 0
        assert first <= past <= end
    of_columns = keys.kind == KEY_COLUMNS
    for head, tile, first, full, end in zip(
        *(x[of_columns] for x in (keys.head, keys.block, keys.first_row, keys.full_row, keys.sign)),
        strict=True,
    ):
        own = np.flatnonzero(kept[head, :, tile])
        assert first <= full <= end
        assert not own.size or first <= own[0] and end == own[-1] + 1
    # All columns in 4 blocks of each of 8 documents: 1 + 2 + 3 + 4 tiles in each, instead of all
    # earlier ones; of every third column 1.33 tiles per document.
    before, after = (x.from_first(x.column_tiles) for x in (walked(whole)[0], rows))
    np.testing.assert_array_equal(rows.column_tile(after), rows.column_tiles)
    first_head = rows.head == 0
    assert after[first_head].sum() == 8 * 10 - 1  # the first row lists its own block
    assert before[walked(whole)[0].head == 0].sum() == 32 * 33 // 2 - 1
    assert after.sum() < 0.2 * before.sum()
    steps = (keys.sign - keys.first_row)[of_columns]
    every = walked(whole)[1]
    every = (blocks - every.first_row)[every.kind == KEY_COLUMNS]
    assert steps[: every.size // 2].sum() == 8 * 10 and steps.sum() < 0.2 * every.sum()
    # Columns in a call of their own.
    alone, of_keys = _query_work(None, columns, size), _key_work(None, columns, size)
    found = _fields(np.asarray(alone.items))
    assert alone.run_first is None and not found.tiles.any()
    assert found.steps.sum() == after.sum()
    assert of_keys.first.shape == of_keys.last.shape == (1, 2, blocks)
    assert of_keys.items.shape[0] == of_columns.sum()


def test_sums_of_parts_replace_the_gradients_of_split_key_blocks():
    """Of keys and values in one array."""
    batch, kv_heads, blocks, dim = 2, 3, 5, 4
    heavy = np.array([[[4, 1], [0, 2], [3, 4]], [[2, 0], [1, 3], [0, 1]]], np.int32)
    rng = np.random.default_rng(0)
    keys = rng.integers(9, size=(2, batch, blocks * 128, kv_heads, dim)).astype(np.float32)
    parts = rng.integers(9, size=(2, batch, 2 * PARTS * 128, kv_heads, dim)).astype(np.float32)
    expected = keys.copy()
    for b, h, m in np.ndindex(*heavy.shape):
        of_block = parts[:, b, :, h].reshape(2, 2, PARTS, 128, dim)[:, m].sum(1)
        expected[:, b, 128 * heavy[b, h, m] :, h][:, :128] = of_block
    found = join_parts(*map(jnp.asarray, (heavy, keys, parts)))
    np.testing.assert_array_equal(found, expected)
