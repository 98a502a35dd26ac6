"""In a pack every pattern selects what it selects for each document alone, on any ranks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.documents import Documents
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.patterns.block_topk import BlockTopK
from mtraining_jax.patterns.budgets import FixedBudget, MInference
from mtraining_jax.patterns.flex_prefill import FlexPrefill
from mtraining_jax.patterns.moba import MoBA
from mtraining_jax.patterns.sampled_rows import SampledRows
from mtraining_jax.patterns.vertical_slash import VerticalSlash
from mtraining_jax.patterns.xattention import XAttention
from mtraining_jax.selection.context import SelectionContext
from tests.patterns import inputs

BLOCK, NUM_BLOCKS, HEADS, DIM, RANKS = 16, 16, 4, 16, 8
SEQ_LEN = BLOCK * NUM_BLOCKS
# A token and a block, which are dense; fewer tokens than queries in the last block; a whole block
# at the end; then padding. The other sequence has a single document that ends with padding.
LENGTHS = [[1, 16, 66, 64, 40], [247]]
PACK = Documents.from_lengths(LENGTHS, SEQ_LEN, BLOCK)
SPARSE = 3  # blocks of a document from which on it is sparse
ANY = dict(block_size=BLOCK, min_sparse_tokens=SPARSE * BLOCK)
SLASH = dict(**ANY, num_probe_queries=8, sink_tokens=2, local_blocks=1, max_verticals=SEQ_LEN)
ROWS = dict(**ANY, tau=0.6, local_blocks=1, sink_blocks=1)


def numbers(*of_heads):
    return np.array(of_heads, np.int32)


# A head without columns and one without diagonals; the last keeps every column.
BUDGETS = dict(
    **ANY,
    verticals=numbers(0, 9, 20, SEQ_LEN),
    slashes=numbers(3, 0, 25, 2),
    num_probe_queries=8,
    max_verticals=SEQ_LEN,
    max_slashes=25,
)
FORCED = dict(sinks=numbers(2, 2, 20, 0), windows=numbers(2, 0, 3, 0), max_sinks=20)
# Patterns in one group share one program.
GROUPS = {
    "safe": {
        "safe": VerticalSlash(top_p=0.6, min_verticals=4, min_slashes=1, max_slashes=2, **SLASH)
    },
    "paper": {"paper": VerticalSlash(top_p=0.3, preset="paper", max_slashes=2, **SLASH)},
    "fixed": {"fixed": FixedBudget(**BUDGETS, sink_tokens=2, sliding_window=3)},
    "minference": {"minference": MInference(**BUDGETS, **FORCED)},
    "rows": {
        "antidiagonals": XAttention(
            stride=4,
            dense_prefix_tokens=2 * BLOCK - 1,
            dense_suffix_tokens=7,
            **ROWS | {"tau": 0.3},
        ),
        "sampled": SampledRows(probe_queries_per_block=3, columns=5, random_block_prob=0.1, **ROWS),
        "means": BlockTopK(top_blocks=3, block_size=BLOCK),
    },
    "flex": {"flex": FlexPrefill(0.5, 0.15, 2 * BLOCK, **ANY)},
    "moba": {"moba": MoBA(2 * BLOCK, 2, BLOCK)},
}


@functools.cache
def arrays():
    """Queries and keys with large logits, so that few keys hold most of the mass."""
    q, k = inputs.random(0, len(LENGTHS), SEQ_LEN, HEADS, 2, DIM)
    return 3 * q, k


@functools.partial(jax.jit, static_argnums=0)
def select(group, q, k, documents):
    """Index, mask and statistics of each pattern."""
    context = SelectionContext(jnp.arange(NUM_BLOCKS), NUM_BLOCKS, documents=documents)
    found = {name: pattern.select(q, k, context) for name, pattern in GROUPS[group].items()}
    return {name: (x.index, x.index.to_mask(SEQ_LEN), x.statistics) for name, x in found.items()}


@functools.cache
def of_pack(group):
    return jax.device_get(select(group, *arrays(), PACK))


def documents_of_pack():
    """Row, first block, blocks and tokens of each document."""
    for row, lengths in enumerate(LENGTHS):
        blocks = [-(-n // BLOCK) for n in lengths]
        starts = np.cumsum([0, *blocks[:-1]]).tolist()
        yield from ((row, *x) for x in zip(starts, blocks, lengths, strict=True))


@pytest.mark.parametrize("group", GROUPS)
def test_a_pack_selects_the_same_as_each_document_on_its_own(group):
    noise = np.asarray(jax.random.normal(jax.random.key(1), (SEQ_LEN, 1, 1)) * 5)
    wanted = {name: np.zeros_like(mask) for name, (_, mask, _) in of_pack(group).items()}
    shares = {name: [[], []] for name in wanted}
    for row, start, blocks, length in documents_of_pack():
        own, size = slice(start * BLOCK, (start + blocks) * BLOCK), blocks * BLOCK
        real = np.arange(SEQ_LEN)[:, None, None] < length
        alone = [
            np.where(real, np.roll(np.asarray(x)[row], -start * BLOCK, 0), noise)[None]
            for x in arrays()
        ]
        documents = Documents.padded(length, SEQ_LEN, BLOCK)
        for name, (_, mask, statistics) in jax.device_get(select(group, *alone, documents)).items():
            mask = mask[0, :, :size, :size]
            if blocks < SPARSE:
                assert (mask == np.tri(size, dtype=bool)).all(), name
            else:
                assert not mask.all((1, 2)).any()
                shares[name][row].append(statistics)
            # Padding of the last block may select anything within the document.
            wanted[name][row, :, own, own] = mask
            wanted[name][row, :, own, own][:, length:] = of_pack(group)[name][1][row, :, own, own][
                :, length:
            ]
    for name, (_, found, statistics) in of_pack(group).items():
        np.testing.assert_array_equal(found, wanted[name], name)
        every_pair = sum(np.tri(b * BLOCK).sum() for _, _, b, _ in documents_of_pack())
        assert found.sum() < 0.9 * HEADS * every_pair, name
        for statistic, of_rows in statistics.items():
            for row, share in enumerate(of_rows):
                each = [x[statistic][0] for x in shares[name][row]]
                np.testing.assert_allclose(share, np.mean(each, 0), rtol=1e-6)


# The mesh tests of attention have lists of rows, and test_moba.py has MoBA. PatternContract has
# FlexPrefill on ranks, without documents.
@pytest.mark.parametrize("group", ["paper", pytest.param("flex", marks=pytest.mark.slow)])
def test_ranks_select_the_same_rows_as_one_device(group):
    layout = Layout("striped", SEQ_LEN, RANKS, BLOCK)
    rows = np.stack([layout.block_ids(rank) for rank in range(RANKS)]).astype(np.int32)

    def on_rank(q, k, block_ids):
        context = SelectionContext(block_ids, NUM_BLOCKS, ("rank",), documents=PACK)
        found = {name: pattern.select(q, k, context) for name, pattern in GROUPS[group].items()}
        return {name: (x.index, x.statistics) for name, x in found.items()}

    # Distributed with NumPy; JAX would compile each step for each number of ranks.
    blocks = [
        np.asarray(x).reshape(len(LENGTHS), NUM_BLOCKS, BLOCK, *x.shape[2:]) for x in arrays()
    ]
    sharded = [np.moveaxis(x[:, rows], 1, 0) for x in blocks]
    sharded = [x.reshape(RANKS, len(LENGTHS), -1, *x.shape[4:]) for x in sharded]
    many = jax.device_get(jax.jit(jax.vmap(on_rank, axis_name="rank"))(*sharded, rows))
    for name, (index, _, statistics) in of_pack(group).items():
        for found, wanted in zip(*map(jax.tree.leaves, (many[name][0], index)), strict=True):
            np.testing.assert_array_equal(np.moveaxis(found, 0, 2), wanted[:, :, rows], name)
        for statistic, share in statistics.items():
            for of_rank in many[name][1][statistic]:
                np.testing.assert_array_equal(of_rank, share)
