"""Every row pattern selects the same in a pack as for each document on its own."""

import jax
import jax.numpy as jnp
import numpy as np

from mtraining_jax.documents import Documents
from mtraining_jax.patterns.block_topk import BlockTopK
from mtraining_jax.patterns.sampled_rows import SampledRows
from mtraining_jax.patterns.xattention import XAttention
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.metrics import attention_recall, density
from tests.patterns import inputs

BLOCK, NUM_BLOCKS, DIM = 16, 12, 16
SEQ_LEN = BLOCK * NUM_BLOCKS
LENGTHS = [33, 70, 16]  # 3, 5 and 1 blocks, and 3 of padding
STARTS = [0, 3, 8]
OPTIONS = dict(tau=0.6, local_blocks=1, sink_blocks=1, min_sparse_tokens=20, block_size=BLOCK)
PATTERNS = {
    "antidiagonals": XAttention(stride=4, dense_suffix_tokens=7, **OPTIONS | {"tau": 0.3}),
    "exact": SampledRows(probe_queries_per_block=BLOCK, random_block_prob=0.3, **OPTIONS),
    "sampled": SampledRows(probe_queries_per_block=3, **OPTIONS),
    "prefix": XAttention(stride=4, dense_prefix_tokens=2 * BLOCK - 1, **OPTIONS),
    "columns": SampledRows(probe_queries_per_block=3, columns=5, **OPTIONS),
    "means": BlockTopK(top_blocks=3, block_size=BLOCK),
}


def sequences():
    """The pack, and each document as a separate sequence followed by data that must not matter."""
    q, k = inputs.random(0, 1, SEQ_LEN, 2, 1, DIM)
    noise = jax.random.normal(jax.random.key(1), (len(LENGTHS), SEQ_LEN, 1, DIM)) * 5

    def all_of(x):
        own = [jnp.roll(x, -start * BLOCK, 1) for start in STARTS]
        own = jnp.concatenate(own)
        count = np.arange(SEQ_LEN) < np.array(LENGTHS)[:, None]
        return jnp.concatenate([x, jnp.where(count[..., None, None], own, noise)])

    documents = Documents.from_lengths([LENGTHS, *[[n] for n in LENGTHS]], SEQ_LEN, BLOCK)
    return all_of(q), all_of(k), documents


def as_bool(bits):
    numbers = np.arange(NUM_BLOCKS)
    return np.asarray(bits)[..., numbers // 32] >> (numbers % 32) & 1 > 0


def test_a_pack_selects_the_same_as_each_document_on_its_own():
    q, k, documents = sequences()

    @jax.jit
    def choose_all(q, k, documents):
        blocks = jnp.arange(NUM_BLOCKS)
        context = SelectionContext(blocks, NUM_BLOCKS, documents=documents)
        return {name: pattern.select(q, k, context).index for name, pattern in PATTERNS.items()}

    for name, index in choose_all(q, k, documents).items():
        bits = as_bool(index.bits)
        wanted = np.zeros_like(bits[0])
        for n, (start, length) in enumerate(zip(STARTS, LENGTHS, strict=True), 1):
            own = slice(start, start + -(-length // BLOCK))
            size = own.stop - own.start
            wanted[:, own, own] = bits[n, :, :size, :size]
            assert not bits[n, :, size:].any() and not bits[n, :, :, size:].any(), name
            if name == "means":
                counts = np.minimum(np.arange(size) + 1, 3)
                np.testing.assert_array_equal(bits[n].sum(-1)[:, :size], [counts, counts])
            else:
                assert bits[n, :, :size, 0].all(), name  # the document's first block
            if name == "prefix":
                assert bits[n, :, : min(size, 2)].sum() == 2 * [1, 3][size > 1]  # of both heads
            if name == "antidiagonals":  # the last 7 of 33, 70 and 16 tokens are in two blocks
                last = bits[n, :, max(size - 2, 0) : size].sum((1, 2))
                assert (last == size + max(size - 1, 0)).all()
            if name == "columns":
                of_pack, alone = index.column_marks[0, :, own], index.column_marks[n, :, :size]
                np.testing.assert_array_equal(of_pack, alone)
                assert np.asarray(of_pack).any() == (size > 2)
                np.testing.assert_array_equal(index.column_start[0, :, own], start)
                assert not np.asarray(index.column_marks[n, :, size:]).any()
        np.testing.assert_array_equal(bits[0], wanted, name)
        assert not wanted.sum((1, 2)).max() == 6 + 15 + 1, name  # some blocks were skipped


def test_densities_and_recall_are_relative_to_documents():
    q, k, documents = sequences()
    context = SelectionContext(jnp.arange(NUM_BLOCKS), NUM_BLOCKS, documents=documents)

    @jax.jit
    def measure(q, k, rows):
        index = PATTERNS["sampled"].select(q, k, context).index
        found = attention_recall(
            q, k, index, rows, block_ids=context.block_ids, documents=documents
        )
        return index.bits, density(index, SEQ_LEN, documents=documents), found

    rows = np.array([2, 30, 50, 100, 120, 130, 150, 190])
    bits, share, recall = measure(q, k, jnp.asarray(rows))
    q, k, bits = np.asarray(q, np.float64)[0], np.asarray(k, np.float64)[0], as_bool(bits)[0]
    triangle = [n * (n + 1) // 2 for n in (48, 80, 16)]
    for h in range(2):
        pairs = bits[h].sum() * BLOCK**2 - 9 * BLOCK * (BLOCK - 1) // 2
        np.testing.assert_allclose(share[0, h], pairs / sum(triangle), rtol=1e-6)
        kept = []
        for row in (2, 30, 50, 100, 120, 130):  # the last ones are padding
            start = max(x for x in STARTS if x * BLOCK <= row) * BLOCK
            weights = np.exp(k[start : row + 1, 0] @ q[row, h] / DIM**0.5)
            on = bits[h, row // BLOCK, np.arange(start, row + 1) // BLOCK]
            if row != 120:  # after the second document's 70 tokens
                kept.append(weights[on].sum() / weights.sum())
        np.testing.assert_allclose(recall[0, h], np.mean(kept), rtol=1e-5)
