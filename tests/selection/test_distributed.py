"""The index is independent of the number of ranks and of the assignment of blocks to them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mtraining_jax.attention.sharded import select_index
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import make_mesh
from mtraining_jax.patterns.budgets import FixedBudget
from mtraining_jax.patterns.vertical_slash import VerticalSlash
from mtraining_jax.selection.metrics import attention_recall
from tests.patterns import inputs

BATCH, SEQ_LEN, HEADS, KV_HEADS, DIM, BLOCK = 2, 640, 4, 2, 32, 16
NUM_BLOCKS = SEQ_LEN // BLOCK
AXES = ("node", "device")
SMALL = dict(block_size=BLOCK, num_probe_queries=15)
PATTERNS = {
    "safe": VerticalSlash(0.6, 256, 40, **SMALL, sink_tokens=4, min_verticals=8, min_slashes=5),
    "fixed": FixedBudget(
        np.array([0, 40, 90, 300], np.int32),
        np.array([3, 10, 20, 40], np.int32),
        max_verticals=128,
        max_slashes=40,
        sink_tokens=3,
        sliding_window=4,
        **SMALL,
    ),
}
ROWS = np.array([0, 17, 300, 301, 555, 639], np.int32)


def choose_all(q, k, block_ids, axis_names):
    where = dict(block_ids=block_ids, axis_names=axis_names)
    indices = {
        name: select_index(q, k, pattern, num_blocks=NUM_BLOCKS, **where)
        for name, pattern in PATTERNS.items()
    }
    return indices, attention_recall(q, k, indices["safe"], ROWS, **where)


@functools.cache
def on_one_device(seed):
    q, k = inputs.random(seed, BATCH, SEQ_LEN, HEADS, KV_HEADS, DIM)
    run = jax.jit(functools.partial(choose_all, axis_names=()))
    return (q, k), jax.device_get(run(q, k, jnp.arange(NUM_BLOCKS)))


@pytest.mark.slow  # PatternContract has both patterns, of other sizes
def test_bit_identical_to_one_device():
    """On eight ranks of five blocks: an odd number, so chunks of two are padded.

    tests/patterns/contract.py has heads that do not divide evenly.
    """
    layout = Layout("striped", SEQ_LEN, 8, BLOCK, 2)
    shards = P("data", AXES)

    def local(q, k):
        indices, recall = choose_all(q, k, layout.block_ids(jax.lax.axis_index(AXES)), AXES)
        # The results of every rank, to check that they agree.
        return jax.tree.map(lambda x: x[None], (indices, recall))

    run = jax.jit(
        jax.shard_map(
            local,
            mesh=make_mesh(1, 2, 4),
            in_specs=shards,
            out_specs=P(AXES, "data"),
            check_vma=False,
        )
    )
    order = layout.permutation()
    for seed in range(2):
        (q, k), (expected, expected_recall) = on_one_device(seed)
        indices, recall = jax.device_get(run(q[:, order], k[:, order]))
        for got, want in zip(*map(jax.tree.leaves, (indices, expected)), strict=True):
            np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape))
        np.testing.assert_allclose(
            recall, np.broadcast_to(expected_recall, recall.shape), rtol=1e-5
        )


def test_the_cases_are_not_trivial():
    _, (indices, recall) = on_one_device(0)
    for index in indices.values():
        assert len(set(index.vertical_count.ravel().tolist())) > 2
        assert len(set(index.slash_count.ravel().tolist())) > 2
    assert ((recall > 0.3) & (recall < 0.999)).all()


@pytest.mark.parametrize(("name", "softmax"), [("safe", 3), ("fixed", 0)])
def test_the_number_of_collectives_is_fixed(name, softmax):
    """For the last queries and the softmax, to distribute heads and to gather the lists.

    The softmax needs a maximum and two sums, which XLA combines on a GPU.
    """
    layout = Layout("striped", SEQ_LEN, 8, BLOCK)

    def local(q, k):
        block_ids = layout.block_ids(jax.lax.axis_index(AXES))
        where = dict(block_ids=block_ids, num_blocks=NUM_BLOCKS, axis_names=AXES)
        return select_index(q, k, PATTERNS[name], **where)

    run = jax.shard_map(
        local,
        mesh=make_mesh(1, 2, 4),
        in_specs=P("data", AXES),
        out_specs=P("data"),
        check_vma=False,
    )
    (q, k), _ = on_one_device(0)
    program = jax.jit(run).lower(q, k).as_text()
    found = re.findall(r"stablehlo\.(all_\w+|reduce_scatter|collective_\w+)", program)
    assert len(found) == 3 + softmax, found
