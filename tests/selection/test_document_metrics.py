"""Densities and recall of a pack, against its documents in fp64."""

import jax
import jax.numpy as jnp
import numpy as np

from mtraining_jax.documents import Documents
from mtraining_jax.patterns.sampled_rows import SampledRows
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.metrics import attention_recall, density
from tests.patterns import inputs

BLOCK, NUM_BLOCKS, DIM = 16, 12, 16
SEQ_LEN = BLOCK * NUM_BLOCKS
LENGTHS = [33, 70, 16]  # 3, 5 and 1 blocks, and 3 of padding
STARTS = [0, 3, 8]
PATTERN = SampledRows(
    tau=0.6, probe_queries_per_block=3, local_blocks=1, min_sparse_tokens=20, block_size=BLOCK
)


def as_bool(bits):
    numbers = np.arange(NUM_BLOCKS)
    return np.asarray(bits)[..., numbers // 32] >> (numbers % 32) & 1 > 0


def test_densities_and_recall_are_relative_to_documents():
    q, k = inputs.random(0, 1, SEQ_LEN, 2, 1, DIM)
    documents = Documents.from_lengths([LENGTHS], SEQ_LEN, BLOCK)
    context = SelectionContext(jnp.arange(NUM_BLOCKS), NUM_BLOCKS, documents=documents)

    @jax.jit
    def measure(q, k, rows):
        index = PATTERN.select(q, k, context).index
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
