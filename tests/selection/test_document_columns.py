"""Room for the columns of packed documents: by their lengths, and by their budgets."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.documents import Documents
from mtraining_jax.patterns.base import ModelSizes
from mtraining_jax.patterns.budgets import FixedBudget, MInference
from mtraining_jax.patterns.sampled_rows import SampledRows
from mtraining_jax.patterns.vertical_slash import VerticalSlash
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.segments import sparse_segments
from mtraining_jax.tools.plan.pattern_costs import capacities
from tests.patterns import inputs

BLOCK, NUM_BLOCKS, DIM = 16, 16, 16
SEQ_LEN = BLOCK * NUM_BLOCKS
# A token and a block, which are dense; fewer tokens than queries in the last block; a whole block
# at the end; then padding. The other sequence has a single document that ends with padding.
LENGTHS = [[1, 16, 66, 64, 40], [247]]
ANY = dict(num_probe_queries=8, block_size=BLOCK, min_sparse_tokens=3 * BLOCK)


def numbers(*of_heads):
    return np.array(of_heads, np.int32)


# A head without columns and one without diagonals; the last keeps every column.
BUDGETS = numbers(0, 9, 20, SEQ_LEN), numbers(3, 0, 25, 2)
FORCED = dict(sinks=numbers(2, 2, 20, 0), windows=numbers(2, 0, 3, 0))
# With 256 tokens and 2 columns per block, a document of 5 blocks has room for 10.
CAPPED = {
    "top-p": VerticalSlash(
        top_p=1.0, max_verticals=16, min_verticals=4, min_slashes=1, max_slashes=2, sink_tokens=2,
        local_blocks=1, **ANY,
    ),
    "budgets": FixedBudget(
        numbers(16, 16, 16, 16),
        numbers(0, 0, 0, 0),
        max_verticals=16,
        max_slashes=0,
        sink_tokens=4,
        sliding_window=0,
        **ANY,
    ),
}  # fmt: skip


def segments(lengths):
    blocks = [-(-n // BLOCK) for n in lengths]
    return list(zip(np.cumsum([0, *blocks[:-1]]).tolist(), blocks, strict=True))


@pytest.mark.parametrize("name", CAPPED)
def test_documents_share_the_column_capacity_by_length(name):
    # Each of its last queries sees the last key it can: all columns have mass, so caps decide.
    q, k = inputs.random(0, len(LENGTHS), SEQ_LEN, 4, 2, DIM)
    documents = Documents.from_lengths(LENGTHS, SEQ_LEN, BLOCK)
    context = SelectionContext(jnp.arange(NUM_BLOCKS), NUM_BLOCKS, documents=documents)
    index = jax.jit(lambda q, k: CAPPED[name].select(q, k, context).index)(3 * q, k)
    marks = index.column_marks[..., 0][..., None] >> np.arange(BLOCK) & 1
    for row, lengths in enumerate(LENGTHS):
        for start, blocks in segments(lengths):
            most = 0 if blocks < 3 else min(max(2 * blocks, 4), 16)
            own = marks[row, :, start : start + blocks].sum((1, 2))
            np.testing.assert_array_equal(own, most)
    assert index.max_columns == 128
    capacity = functools.partial(capacities, CAPPED[name], documents=True)
    assert capacity(NUM_BLOCKS)[1] == 128
    # 512 blocks: room for 32 columns in total, but at least 4 for each of 170 documents.
    assert capacity(512)[1] == 768


def test_padding_belongs_to_no_document():
    documents = Documents.from_lengths([[20, 40]], 128, 8)
    found = sparse_segments(SelectionContext(jnp.arange(16), 16, documents=documents), 3, 8)
    assert found.slot_of_block.tolist() == [[0] * 3 + [1] * 5 + [3] * 8]
    assert found.first.tolist() == [[0, 3, 16]] and found.tokens.tolist() == [[20, 40, 0]]
    assert found.inside.sum() == found.length.sum() == 8


def test_the_column_capacity_covers_the_budgets_of_each_document():
    assert capacities(VerticalSlash(), 4096, True)[1] == 8192 + 64 * 128
    room = dict(max_verticals=1000, max_slashes=0, block_size=128)
    budgets = MInference(*BUDGETS, **FORCED, **room, max_sinks=20)
    # 2000 and 64 * 20, as multiples of 128.
    assert capacities(budgets, 4096, True)[1] == 26 * 128
    # Columns of six documents of five blocks; marks and a number per row.
    rows = SampledRows(columns=10, probe_queries_per_block=4, min_sparse_tokens=40, block_size=8)
    assert capacities(rows, 32, True) == (32 * 3, 6 * 10)


@pytest.mark.parametrize("kind", [FixedBudget, MInference])
def test_budget_files_have_the_capacities_of_their_pattern(kind, tmp_path):
    path = tmp_path / "budgets.json"
    path.write_text(json.dumps([[["stream_llm", 40, 5, 1.0], ["vertical_and_slash", 60, 7, 1.0]]]))
    settings, model = (
        kind(budget_file=str(path), min_sparse_tokens=2048, sink_tokens=9),
        ModelSizes(1, 2, 8192),
    )
    pattern = settings.bind(model)
    assert pattern.min_sparse_tokens == 2048
    for documents in (False, True):
        assert (
            settings.sharded_by_query(documents) == pattern.sharded_by_query(documents) == documents
        )
        assert capacities(settings, 64, documents) == capacities(pattern, 64, documents)
    # 64 blocks: 120 columns by length, and the sinks of 4 documents; at most 60 of each.
    sinks = 9 if kind is FixedBudget else 40
    assert capacities(settings, 64, True)[1] == -(-min(120 + 4 * sinks, 240) // 128) * 128
