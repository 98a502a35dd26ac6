"""The order of the row kernels' items, and how they are dealt out to thread blocks."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import DiagonalTiles
from pallas_kernels.work.items import QueryItem
from pallas_kernels.work.query_work import LONG, query_work, share
from tests.pallas_kernels import cases
from tests.pallas_kernels.cases import Size


def _items(blocks: int, dense: bool = True) -> tuple[Size, np.ndarray]:
    size = Size(2, 6, 3, blocks, blocks, block_size=128, dim=8)
    tiles = DiagonalTiles.full(size.batch, size.heads, blocks, blocks, 128, causal=True)
    columns = None
    if not dense:
        rng = np.random.default_rng(0)
        index = cases.vertical_slash(rng, size, max_slashes=9, max_verticals=400)
        tiles, columns = cases.tiles_and_columns(index, size)
    work = query_work(tiles, columns, size.batch, size.heads, blocks, blocks, size.kv_heads)
    return size, np.asarray(work.items)


def _work(items: np.ndarray) -> np.ndarray:
    return _fields(items).steps


def _fields(items: np.ndarray) -> QueryItem:
    return QueryItem(*items.T[: len(QueryItem._fields)])


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("blocks", [24, LONG])
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
def test_items_of_a_long_sequence_come_by_key_head_and_ascend_and_descend_in_turn(dense):
    size, items = _items(LONG, dense)
    parts = size.batch * size.kv_heads
    group = size.heads // size.kv_heads
    key_head = _fields(items).batch * size.kv_heads + _fields(items).head // group
    assert (key_head.reshape(parts, -1) == np.arange(parts)[:, None]).all()
    steps = np.diff(_work(items).reshape(parts, -1), axis=1)
    assert (steps[1::2] <= 0).all()
    assert (steps[0::2] >= 0).all()


@pytest.mark.parametrize(("num_items", "num_blocks"), [(1, 1), (5, 5), (7, 3), (8, 3), (96, 10)])
def test_every_item_is_dealt_to_one_block(num_items, num_blocks):
    dealt = []
    for block in range(num_blocks):
        count, number = share(jnp.int32(block), num_items, num_blocks)
        dealt += [int(number(jnp.int32(n))) for n in range(int(count))]
    assert sorted(dealt) == list(range(num_items))


@pytest.mark.parametrize("blocks", [24, LONG])
def test_thread_blocks_get_the_same_work_and_go_through_it_in_step(blocks):
    _, items = _items(blocks)
    work, num_blocks = _work(items), 20
    ends = []
    for block in range(num_blocks):
        count, number = share(jnp.int32(block), len(work), num_blocks)
        ends.append(np.cumsum([work[int(number(jnp.int32(n)))] for n in range(int(count))]))
    rounds = min(len(x) for x in ends)
    apart = np.ptp([x[:rounds] for x in ends], axis=0)
    assert apart.max() <= work.max() / 4
    total = [x[-1] for x in ends]
    assert max(total) <= 1.01 * np.mean(total)
