"""Sparse indices and inputs shared by the tests of this folder."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.index import VerticalSlashIndex
from tests.pallas_kernels.helpers import cases
from tests.pallas_kernels.helpers.cases import Size

SEQ_LEN, BLOCK_SIZE, BATCH, HEADS, KV_HEADS, DIM = 256, 8, 2, 6, 3, 16
NUM_BLOCKS = SEQ_LEN // BLOCK_SIZE
MAX_VERTICALS = 40


def build(slashes, verticals):
    """Builds an index from nested lists [B][Hq] of block diagonals and of key tokens."""
    blocks = np.full((BATCH, HEADS, NUM_BLOCKS), NUM_BLOCKS, np.int32)
    tokens = np.full((BATCH, HEADS, MAX_VERTICALS), SEQ_LEN, np.int32)
    counts = np.zeros((2, BATCH, HEADS), np.int32)
    for table, lists, count in zip((blocks, tokens), (slashes, verticals), counts, strict=True):
        for b in range(BATCH):
            for h in range(HEADS):
                entries = sorted(set(map(int, lists[b][h])))
                table[b, h, : len(entries)] = entries
                count[b, h] = len(entries)
    return VerticalSlashIndex(
        *map(jnp.asarray, (blocks, counts[0], tokens, counts[1])), block_size=BLOCK_SIZE
    )


def sparse(seed=0):
    """An index with 2 to 20 % of the causal pairs, and every special case in some head."""
    rng = np.random.default_rng(seed)

    def some(count, size):
        return rng.choice(size, count, replace=False)

    far = NUM_BLOCKS - 1
    slashes = [
        [[0, 1, far], [], [3, *some(2, far)], [0], [1, 2], [0, 5]],
        [[0, *some(5, far)], [far], [], [0, 1, 2, 8, 16, 24], [0], [7]],
    ]
    verticals = [
        # inside and outside active blocks; the first and the last token
        [
            [0, 1, 5, 9, SEQ_LEN - 1, *some(6, SEQ_LEN)], some(12, SEQ_LEN), [], range(17, 20),
            [3], [],
        ],
        # a full list; only one far diagonal; nothing at all
        [some(MAX_VERTICALS, SEQ_LEN), [], [], [SEQ_LEN // 2, *some(20, SEQ_LEN)], [0], [200]],
    ]  # fmt: skip
    return build(slashes, verticals)


def dense():
    """Every causal pair, with the capacities of `sparse` to avoid recompilation."""
    everything = [[range(NUM_BLOCKS)] * HEADS] * BATCH
    return build(everything, [[[]] * HEADS] * BATCH)


def block_mask(seed=2):
    """A third of the blocks, with an empty head, empty rows and a full column."""
    mask = np.random.default_rng(seed).random((BATCH, HEADS, NUM_BLOCKS, NUM_BLOCKS)) < 1 / 3
    mask[0, 1], mask[0, 2, ::3], mask[1, 2, :, 0] = False, False, True
    return jnp.asarray(mask)


def blocks():
    """Block lists."""
    return cases.lists_of_mask(block_mask(), BLOCK_SIZE)


def bits(rows=None):
    """The blocks of `blocks` as bits; `rows` gives the order of query blocks."""
    mask = block_mask() if rows is None else block_mask()[:, :, rows]
    return cases.bits_of_mask(mask, BLOCK_SIZE, rows)


def bits_and_columns(rows=None):
    """The blocks of `bits`, plus columns, many of them outside the listed blocks.

    In the second sequence, rows from the sixth block on have no columns before that block.
    """
    tokens = np.random.default_rng(3).integers(0, SEQ_LEN, (BATCH, HEADS, MAX_VERTICALS))
    tokens[0, 3], tokens[1, 3, 5:] = SEQ_LEN, -1  # none, and only a few
    numbers = np.arange(NUM_BLOCKS) if rows is None else np.asarray(rows)
    start = np.where(numbers < 5, 0, 5) * np.arange(BATCH)[:, None, None]

    @jax.jit
    def with_columns(index, tokens, start, rows):
        return index.with_columns(tokens, rows).columns_from(start)

    return with_columns(bits(rows), tokens.astype(np.int32), start, rows)


def dense_documents():
    """Every causal pair of documents of many lengths, with padding between and after them."""
    size = Size(BATCH, HEADS, KV_HEADS, NUM_BLOCKS, NUM_BLOCKS, BLOCK_SIZE, DIM)
    return cases.dense_documents(size, [[13, 1, 1, -2, 9, 3, 1], [2, 29]])


def inputs(seed=1, dtype=jnp.float32):
    """Returns q, k, v and the gradient of the output, in sequence order."""
    rng = np.random.default_rng(seed)
    return tuple(
        jnp.asarray(rng.standard_normal((BATCH, SEQ_LEN, heads, DIM)), dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
