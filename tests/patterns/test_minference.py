"""MInference's files, and selection by their budgets against its definition."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.attention.sharded import select_index
from mtraining_jax.patterns.base import ModelSizes
from mtraining_jax.patterns.budgets import MInference
from mtraining_jax.utils.errors import UserError
from tests.patterns import inputs, oracle

SEQ_LEN, BLOCK, LAST_Q, SINKS, WINDOW = 512, 16, 16, 3, 5
NUM_BLOCKS = SEQ_LEN // BLOCK
LAYER = [
    ["vertical_and_slash", 60, 80, 0.9],
    ["vertical_and_slash", 0, 0, 1.0],  # raised to 30 and 50
    ["stream_llm", 10, 40, 1.0],
]


def settings(path, heads, **options):
    path.write_text(json.dumps([heads, heads]))
    return MInference(
        budget_file=str(path),
        num_probe_queries=LAST_Q,
        sink_tokens=SINKS,
        sliding_window=WINDOW,
        block_size=BLOCK,
        **options,
    )


def largest(scores, count, forced):
    """The definition: forced first, then score descending, then number ascending."""
    order = sorted(range(len(scores)), key=lambda i: (i >= forced, -scores[i], i))
    return set(order[:count])


def test_each_head_follows_its_type(tmp_path):
    of_file = settings(tmp_path / "budgets.json", LAYER)
    pattern = of_file.bind(ModelSizes(2, 3, SEQ_LEN))
    first = jax.tree.map(lambda x: x[0], pattern)
    q, k = inputs.random(0, 2, SEQ_LEN, 3, 1, 16)
    index = jax.jit(
        lambda q, k, pattern: select_index(
            q, k, pattern, block_ids=jnp.arange(NUM_BLOCKS), num_blocks=NUM_BLOCKS
        )
    )(q, k, first)
    weights = oracle.softmax(oracle.last_logits(q, k, LAST_Q, 16**-0.5))
    columns, diagonals = weights.mean(2), oracle.diagonal_sums(weights) / LAST_Q
    expected = [(60, SINKS, 80, WINDOW), (30, SINKS, 50, WINDOW), (10, 10, 40, 40)]
    for b in range(2):
        for h, (verticals, sinks, slashes, window) in enumerate(expected):
            wanted = largest(np.round(columns[b, h], 8), verticals, sinks)
            found = oracle.entries(index.vertical_tokens[b, h], index.vertical_count[b, h])
            # Masses that rounding may reorder may be kept either way.
            cut = min(columns[b, h][list(wanted)])
            either = {i for i in range(SEQ_LEN) if abs(columns[b, h, i] - cut) < 1e-6 * cut}
            assert len(found) == verticals and set(found) ^ wanted <= either
            near = largest(diagonals[b, h], slashes, window)
            wanted = oracle.block_diagonals(near, BLOCK, NUM_BLOCKS) | {0}
            found = oracle.entries(index.slash_blocks[b, h], index.slash_count[b, h])
            assert set(found) == wanted


def test_an_unknown_type_raises_and_block_sparse_can_be_swapped(tmp_path):
    model = ModelSizes(2, 1, SEQ_LEN)
    blocks = settings(tmp_path / "blocks.json", [["block_sparse", 100, 0, 1.0]])
    with pytest.raises(UserError, match="layer 0, head 0 has type 'block_sparse'; .*swap_block"):
        blocks.bind(model)
    swapped = settings(
        tmp_path / "blocks.json", [["block_sparse", 100, 0, 1.0]], swap_block_sparse=True
    ).bind(model)
    np.testing.assert_array_equal(swapped.verticals, [[1000]] * 2)
    np.testing.assert_array_equal(swapped.slashes, [[6096]] * 2)
    other = settings(tmp_path / "other.json", [["poly", 100, 0, 1.0]], swap_block_sparse=True)
    with pytest.raises(UserError, match="head 0 has type 'poly'; it must be 'vertical_and_sla"):
        other.bind(model)
    with pytest.raises(UserError, match="has 2 layers of 1 heads, but the model has 3 layers of 1"):
        blocks = settings(tmp_path / "few.json", [["stream_llm", 1, 2]])
        blocks.bind(ModelSizes(3, 1, SEQ_LEN))
