"""The work list of the fused backward kernel, traversed in NumPy like in the kernel."""

import collections
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Columns, DenseIndex, DiagonalTiles, SegmentedDiagonals, WindowIndex
from pallas_kernels.index import Segment
from pallas_kernels.mosaic_gpu.backend import MosaicGpu
from pallas_kernels.tiles import COLUMN_TILE, NO_DIAGONAL, Tiles
from pallas_kernels.work.fused_work import FusedWork, fused_work
from pallas_kernels.work.items import KeyItem
from pallas_kernels.work.key_work import KeyWork
from pallas_kernels.work.lists import Sizes
from tests.pallas_kernels.helpers import brute_force, cases
from tests.pallas_kernels.helpers.cases import Size

G = 128
MASKS = (
    "random with columns",
    "random",
    "shards",
    "causal",
    "full",
    "window",
    "segments",
    "segments with columns",
    "documents",
    "documents of shards",
)
SEGMENTS = 3


def _problem(mask: str, size: Size) -> tuple[Tiles, Columns | None, np.ndarray]:
    """Tiles, columns and the blocks [B, Hq, nq, nk] that the tiles visit."""
    lengths = size.query_blocks, size.key_blocks
    if mask.startswith("segments"):
        tiles, blocks = _segments(size)
        columns = _problem("random with columns", size)[1] if "columns" in mask else None
        return tiles, columns, blocks
    if mask.startswith("documents"):
        return _documents(mask, size)
    tiles, columns = _one_segment(mask, size)
    return tiles, columns, brute_force.tile_blocks(tiles, *lengths)


def _one_segment(mask: str, size: Size) -> tuple[DiagonalTiles, Columns | None]:
    rng = np.random.default_rng(size.heads)
    if mask == "shards":
        return cases.diagonal_tiles(rng, size, capacity=10, diagonal=-2, garbage=rng), None
    if mask in ("causal", "full"):
        lengths = size.query_blocks, size.key_blocks
        return (
            DiagonalTiles.full(size.batch, size.heads, *lengths, G, causal=mask == "causal"),
            None,
        )
    if mask == "window":
        index = WindowIndex.of_sequence(size.batch, size.heads, size.key_blocks, G, 3 * G)
        lengths = size.query_blocks * G, size.key_blocks * G
        return index.on_one_device(size.batch, lengths[0], size.heads, lengths[1])
    index = cases.vertical_slash(rng, size, max_slashes=4, max_verticals=200, garbage=rng)
    tiles, columns = cases.tiles_and_columns(index, size)
    return tiles, None if mask == "random" else columns


def _documents(mask: str, size: Size) -> tuple[DiagonalTiles, None, np.ndarray]:
    """Documents on one device, or queries and keys of two among three ranks."""
    ranks = 1 if mask == "documents" else 3
    blocks = size.key_blocks * ranks
    whole = dataclasses.replace(size, query_blocks=blocks, key_blocks=blocks, block_size=1)
    lengths = [3 * ranks, -1, 1, 2 * ranks + 1, 1]
    index = cases.dense_documents(whole, [[*lengths, blocks - sum(map(abs, lengths))]])
    index = dataclasses.replace(index, block_size=G)
    query, key = (Segment(rank, ranks, size.key_blocks) for rank in (ranks - 1, 0))

    @jax.jit
    def of_pair(index):
        return index.shards(size.batch, size.heads, ranks, blocks).pair(query, key)

    tiles = of_pair(index)
    whole = brute_force.index_mask(dataclasses.replace(index, block_size=1), blocks)
    return tiles, None, whole[:, :, query.blocks()][..., key.blocks()]


def _segments(size: Size) -> tuple[SegmentedDiagonals, np.ndarray]:
    """Runs in another order than their segments, one of which no query sees."""
    columns = size.key_blocks // SEGMENTS
    part = dataclasses.replace(size, key_blocks=columns)
    rng, order = np.random.default_rng(size.heads), [2, 0]
    parts = [cases.diagonal_tiles(rng, part, capacity=8, diagonal=-2, garbage=rng) for _ in order]
    blocks = np.zeros((size.batch, size.heads, size.query_blocks, size.key_blocks), bool)
    for n, tiles in zip(order, parts, strict=True):
        seen = brute_force.tile_blocks(tiles, size.query_blocks, columns)
        blocks[..., n * columns : (n + 1) * columns] = seen
    tiles = SegmentedDiagonals(
        np.concatenate(
            [p.offsets - n * columns for n, p in zip(order, parts, strict=True)], axis=-1
        ),
        np.stack([p.start + 8 * r for r, p in enumerate(parts)], axis=-1),
        np.stack([p.stop + 8 * r for r, p in enumerate(parts)], axis=-1),
        np.array(order, np.int32),
        NO_DIAGONAL,
        SEGMENTS,
        G,
    )
    return jax.tree.map(jnp.asarray, tiles), blocks


def _walk(work: FusedWork, num_query_blocks: int) -> dict:
    """Additions to the dq of each (batch, head, row), in launch order: turn, item, other."""
    added = collections.defaultdict(list)
    for n, item in enumerate(work.items):
        it = KeyItem(*(int(x) for x in item))
        batch, block, sign = it.batch, it.block, it.sign
        if it.columns:
            for row in range(num_query_blocks - 1, it.first_row - 1, -1):
                added[batch, it.head, row].append((block, n, ("columns", block)))
            continue
        for head in range(it.head, it.head + work.heads):
            first, last = work.first[batch, head, block], work.last[batch, head, block]
            for s in range(first, last)[::sign]:
                row = block + int(work.lists[batch, head, s])
                turn = int(work.turns[batch, head, row] + sign * work.ranks[batch, head, s])
                added[batch, head, row].append((turn, n, ("keys", block)))
    return added


def test_documents_in_the_keys_of_several_ranks_use_two_kernels():
    """Of blocks 3, 4 and 5, at the same position of three ranks, row 6 sees the last two."""
    size = Size(1, 2, 1, 12, 12, G, dim=64)
    index = cases.dense_documents(size, [[4, 8]])

    @jax.jit
    def gathered(index):
        shards = index.shards(1, size.heads, 3, size.key_blocks)
        tiles = shards.gathered(Segment(0, 3, 4), jnp.arange(3), skip_own=False)
        return tiles, tiles.row_lists(4, 12)

    tiles, (_, first, last) = jax.device_get(gathered(index))
    assert (last - first)[0, 0, :, 2].tolist() == [1, 1, 1]  # keys 6, 5 and 4
    q, k = (jax.ShapeDtypeStruct((1, n * G, h, 64), "bfloat16") for n, h in ((4, 2), (12, 1)))
    backend = MosaicGpu("one kernel", interpret=True, one_backward_kernel=True)
    plan = functools.partial(backend.plan, single_call=False)
    assert isinstance(jax.eval_shape(plan, q, k, tiles, None).keys, KeyWork)
    alone = cases.tiles_and_columns(index, size)[0]
    assert isinstance(jax.eval_shape(plan, k, k, alone, None).keys, FusedWork)


def test_a_single_document_is_processed_like_a_sequence_without_documents():
    size = Size(1, 4, 2, 12, 12, G, dim=64)
    indices = DenseIndex(G), cases.dense_documents(size, [[12]])
    shapes = [jax.ShapeDtypeStruct((1, 12 * G, heads, 64), "bfloat16") for heads in (4, 2)]
    backend = MosaicGpu("one document", interpret=True)  # two multiprocessors: short waves

    @jax.jit
    def plan(index):
        tiles = index.on_one_device(1, 12 * G, 4, 12 * G)[0]
        return backend.plan(*shapes, tiles, None, single_call=True)

    works = [plan(x) for x in indices]
    assert isinstance(works[0].keys, FusedWork)
    jax.tree.map(np.testing.assert_array_equal, *works)


@pytest.mark.parametrize("mask", MASKS)
def test_turns_follow_the_list_and_every_tile_has_one(mask):
    heads, kv_heads, queries = 6, 2, 9
    keys = {"shards": 7, "full": 7, "window": 11}.get(mask, 9)
    tiles, columns, blocks = _problem(mask, Size(1, heads, kv_heads, queries, keys, G, dim=0))
    expected = collections.defaultdict(set)
    for batch, head, row, block in np.argwhere(blocks):
        expected[batch, head, row].add(("keys", block))
    for at, others in _column_tiles(columns).items():
        expected[at] |= others
    for item_heads, wave in itertools.product((None, 1, 2), (0, 1, 4)):
        sizes = Sizes(1, heads, queries, keys, kv_heads)
        work = fused_work(tiles, columns, sizes, item_heads=item_heads, wave=wave)
        added = _walk(jax.tree.map(np.asarray, work), queries)
        assert added.keys() == expected.keys()
        for at, additions in added.items():
            turns, items, others = zip(*additions, strict=True)
            # In launch order, so that an item only waits for items that have started.
            assert turns == tuple(range(len(turns))) and list(items) == sorted(set(items)), at
            assert set(others) == expected[at] and len(set(others)) == len(others), at


def _column_tiles(columns: Columns | None) -> dict:
    """The column tiles that each row may see, by the positions of their valid tokens."""
    seen = collections.defaultdict(set)
    if columns is None:
        return seen
    for batch, head in np.ndindex(*columns.count.shape):
        live = np.asarray(columns.tokens[batch, head, : columns.count[batch, head]])
        for c, token in enumerate(live):
            for row in range(int(token) // G, columns.query_blocks.size):
                seen[batch, head, row].add(("columns", c // COLUMN_TILE))
    return seen


def test_items_of_the_same_keys_add_in_launch_order():
    heads, kv_heads = 6, 2
    every = DiagonalTiles.full(2, heads, 9, 9, G, causal=True)
    size = Size(2, heads, 1, 9, 9, G, dim=0)
    index = cases.dense_documents(size, [[3, 2, 4], [6, -1, 2]])
    documents, _ = cases.tiles_and_columns(index, size)
    ways = itertools.product((every, documents), ((None, 1), (1, 3), (2, 3)), (0, 4))
    for tiles, (item_heads, items), wave in ways:
        sizes = Sizes(2, heads, 9, 9, kv_heads)
        work = fused_work(tiles, None, sizes, item_heads=item_heads, wave=wave)
        turns = collections.defaultdict(list)
        for item in np.asarray(work.items):
            it = KeyItem(*item)
            turns[it.batch, it.head // (heads // kv_heads), it.block].append(it.key_turn)
        assert len(turns) == 2 * kv_heads * 9
        for at in turns.values():
            assert at == list(range(items))


@pytest.mark.parametrize(("wave", "signs"), [(9, {1, -1}), (10, {1})])
def test_sequences_shorter_than_a_wave_rise(wave, signs):
    tiles = DiagonalTiles.full(1, 2, 9, 9, G, causal=True)
    work = fused_work(tiles, None, Sizes(1, 2, 9, 9, 2), wave=wave)
    assert {KeyItem(*item).sign for item in np.asarray(work.items).tolist()} == signs


def test_documents_shorter_than_a_wave_rise():
    size = Size(1, 2, 2, 9, 9, G, dim=0)
    tiles, _ = cases.tiles_and_columns(cases.dense_documents(size, [[3, 6]]), size)
    work = fused_work(tiles, None, Sizes(1, 2, 9, 9, 2), wave=5)
    items = (KeyItem(*item) for item in np.asarray(work.items).tolist())
    signs = {(item.block < 3, item.sign) for item in items}
    assert signs == {(True, 1), (False, 1), (False, -1)}
