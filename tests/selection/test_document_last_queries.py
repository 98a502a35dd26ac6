"""Patterns with probe queries select the same in a pack as for single documents, on any ranks."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.documents import Documents
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.patterns.base import ModelSizes
from mtraining_jax.patterns.budgets import FixedBudget, MInference
from mtraining_jax.patterns.vertical_slash import VerticalSlash
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.tools.plan.pattern_costs import capacities
from tests.pallas_kernels.helpers.brute_force import index_mask
from tests.patterns import inputs

BLOCK, NUM_BLOCKS, DIM = 16, 16, 16
SEQ_LEN = BLOCK * NUM_BLOCKS
# A token and a block, which are dense; fewer tokens than queries in the last block; a whole block
# at the end; then padding. The other sequence has a single document that ends with padding.
LENGTHS = [[1, 16, 66, 64, 40], [247]]
ANY = dict(num_probe_queries=8, block_size=BLOCK, min_sparse_tokens=3 * BLOCK)
OPTIONS = dict(**ANY, sink_tokens=2, local_blocks=1)
FEW = dict(min_verticals=4, min_slashes=1, max_slashes=2)


def numbers(*of_heads):
    return np.array(of_heads, np.int32)


# A head without columns and one without diagonals; the last keeps every column.
BUDGETS = numbers(0, 9, 20, SEQ_LEN), numbers(3, 0, 25, 2)
FORCED = dict(sinks=numbers(2, 2, 20, 0), windows=numbers(2, 0, 3, 0))
PATTERNS = {
    "safe": VerticalSlash(top_p=0.6, max_verticals=SEQ_LEN, **FEW, **OPTIONS),
    "paper": VerticalSlash(
        top_p=0.5, preset="paper", max_slashes=2, max_verticals=SEQ_LEN, **OPTIONS
    ),
    "fixed": FixedBudget(
        *BUDGETS, max_verticals=SEQ_LEN, max_slashes=25, sink_tokens=2, sliding_window=3, **ANY
    ),
    "minference": MInference(
        *BUDGETS, **FORCED, max_verticals=SEQ_LEN, max_slashes=25, max_sinks=20, **ANY
    ),
}
# With 256 tokens and 2 columns per block, a document of 5 blocks has room for 10.
CAPPED = {
    "top-p": VerticalSlash(top_p=1.0, max_verticals=16, **FEW, **OPTIONS),
    "budgets": FixedBudget(
        numbers(16, 16, 16, 16),
        numbers(0, 0, 0, 0),
        max_verticals=16,
        max_slashes=0,
        sink_tokens=4,
        sliding_window=0,
        **ANY,
    ),
}
EVERY = PATTERNS | CAPPED


def segments(lengths):
    blocks = [-(-n // BLOCK) for n in lengths]
    return list(zip(np.cumsum([0, *blocks[:-1]]).tolist(), blocks, strict=True))


@functools.cache
def arrays():
    """Queries and keys with large logits, so that few keys hold most of the mass."""
    q, k = inputs.random(0, len(LENGTHS), SEQ_LEN, 4, 2, DIM)
    return 3 * q, k


@functools.partial(jax.jit, static_argnums=0)
def select(name, q, k, documents):
    context = SelectionContext(jnp.arange(NUM_BLOCKS), NUM_BLOCKS, documents=documents)
    return EVERY[name].select(q, k, context)


@functools.cache
def pack(name):
    documents = Documents.from_lengths(LENGTHS, SEQ_LEN, BLOCK)
    return jax.device_get(select(name, *arrays(), documents))


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pack_selects_the_same_as_each_document_on_its_own(name):
    found, saved = index_mask(pack(name).index, SEQ_LEN), []
    wanted = np.zeros_like(found)
    noise = np.asarray(jax.random.normal(jax.random.key(1), (SEQ_LEN, 1, 1)) * 5)
    for row, lengths in enumerate(LENGTHS):
        for (start, blocks), length in zip(segments(lengths), lengths, strict=True):
            own = slice(start * BLOCK, (start + blocks) * BLOCK)
            size = blocks * BLOCK
            wanted[row, :, own, own] = np.tri(size, dtype=bool)
            if blocks < 3:
                continue
            counts = np.arange(SEQ_LEN)[:, None, None] < length
            alone = [
                np.where(counts, np.roll(np.asarray(x)[row], -start * BLOCK, 0), noise)[None]
                for x in arrays()
            ]
            selection = jax.device_get(
                select(name, *alone, Documents.padded(length, SEQ_LEN, BLOCK))
            )
            mask = index_mask(selection.index, SEQ_LEN)[0, :, :size, :size]
            assert not mask.all((1, 2)).any() and mask.sum() < 4 * np.tri(size).sum()
            wanted[row, :, own, own] = mask
            saved.append([row, selection.statistics.get("saved_heads", np.zeros((1, 4)))[0]])
    np.testing.assert_array_equal(found, wanted)
    if name == "paper":
        for row, share in enumerate(pack(name).statistics["saved_heads"]):
            of_documents = [x for at, x in saved if at == row]
            np.testing.assert_allclose(share, np.mean(of_documents, 0), rtol=1e-6)


@pytest.mark.parametrize("name", CAPPED)
def test_documents_share_the_column_capacity_by_length(name):
    # Each of its last queries sees the last key it can: all columns have mass, so caps decide.
    index = pack(name).index
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


def test_the_column_capacity_covers_the_budgets_of_each_document():
    assert capacities(VerticalSlash(), 4096, True)[1] == 8192 + 64 * 128
    room = dict(max_verticals=1000, max_slashes=0, block_size=128)
    budgets = MInference(*BUDGETS, **FORCED, **room, max_sinks=20)
    # 2000 and 64 * 20, as multiples of 128.
    assert capacities(budgets, 4096, True)[1] == 26 * 128


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


@pytest.mark.parametrize(("name", "ranks"), [("paper", 2), ("paper", 8), ("fixed", 4)])
def test_ranks_select_the_same_rows_as_one_device(name, ranks):
    pattern, layout = PATTERNS[name], Layout("striped", SEQ_LEN, ranks, BLOCK)
    rows = np.stack([layout.block_ids(rank) for rank in range(ranks)]).astype(np.int32)
    documents = Documents.from_lengths(LENGTHS, SEQ_LEN, BLOCK)

    def on_rank(q, k, block_ids):
        context = SelectionContext(block_ids, NUM_BLOCKS, ("rank",), documents=documents)
        return pattern.select(q, k, context)

    # Distributed with NumPy; JAX would compile each step for each number of ranks.
    blocks = [
        np.asarray(x).reshape(len(LENGTHS), NUM_BLOCKS, BLOCK, *x.shape[2:]) for x in arrays()
    ]
    sharded = [np.moveaxis(x[:, rows], 1, 0) for x in blocks]
    sharded = [x.reshape(ranks, len(LENGTHS), -1, *x.shape[4:]) for x in sharded]
    many, one = jax.jit(jax.vmap(on_rank, axis_name="rank"))(*sharded, rows), pack(name)
    for field in ("bits", "column_marks", "column_start"):
        found, wanted = (np.asarray(getattr(x.index, field)) for x in (many, one))
        np.testing.assert_array_equal(
            np.moveaxis(found, 0, 3)[:, :, range(rows.shape[1])],
            np.moveaxis(wanted[:, :, rows], 2, 3),
            field,
        )
    for statistic, shares in many.statistics.items():
        for share in shares:
            np.testing.assert_array_equal(share, one.statistics[statistic])
