"""Selection with padding at the end: as if it were not there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax import Documents, sparse_attention
from mtraining_jax.attention.sharded import select_pairs
from mtraining_jax.patterns.budgets import FixedBudget
from mtraining_jax.patterns.sampled_rows import SampledRows
from mtraining_jax.patterns.vertical_slash import VerticalSlash
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.utils.errors import UserError
from pallas_kernels.index import bits as sets
from tests.patterns import inputs, oracle

SEQ_LEN, HEADS, KV_HEADS, DIM, BLOCK, LAST_Q = 512, 4, 2, 16, 16, 15
SMALL = dict(block_size=BLOCK, num_probe_queries=LAST_Q)
PATTERNS = {
    "safe": VerticalSlash(0.7, 128, 20, **SMALL, sink_tokens=12, min_verticals=8, min_slashes=5),
    "paper": VerticalSlash(0.8, 128, 24, "paper", **SMALL),
    "fixed": FixedBudget(
        np.array([0, 9, 60, 300], np.int32), np.array([3, 10, 20, 40], np.int32),
        max_verticals=300, max_slashes=40, sink_tokens=12, sliding_window=4, **SMALL,
    ),
}  # fmt: skip


@jax.jit
def choose_all(q, k, valid_len):
    num_blocks = q.shape[1] // BLOCK
    documents = None
    if valid_len is not None:
        documents = Documents.padded(valid_len, q.shape[1], BLOCK)
    context = SelectionContext(jnp.arange(num_blocks), num_blocks, documents=documents)
    return {name: select_pairs(pattern, q, k, context).index for name, pattern in PATTERNS.items()}


def listed(index, head):
    at = (0, head)
    return (
        oracle.entries(index.slash_blocks[at], index.slash_count[at]),
        oracle.entries(index.vertical_tokens[at], index.vertical_count[at]),
    )


@pytest.fixture(scope="module")
def heads():
    q, k = inputs.random(0, 1, SEQ_LEN, HEADS, KV_HEADS, DIM)
    noise = jax.random.normal(jax.random.key(1), (2, SEQ_LEN, 1, DIM))

    def padded(valid_len, pad):
        """Replaces entries from `valid_len` on by larger ones."""
        keep = (jnp.arange(SEQ_LEN) < valid_len)[:, None, None]
        return [jnp.where(keep, x, pad * y) for x, y in zip((q, k), noise, strict=True)]

    return q, k, padded


def test_whole_blocks_of_padding_change_nothing(heads):
    q, k, padded = heads
    count = 24 * BLOCK
    plain = jax.device_get(choose_all(q[:, :count], k[:, :count], None))
    found = jax.device_get(choose_all(*padded(count, 50.0), jnp.int32(count)))
    for name in PATTERNS:
        for head in range(HEADS):
            assert listed(found[name], head) == listed(plain[name], head), (name, head)


def test_a_prompt_may_end_inside_a_block(heads):
    q, k, padded = heads
    count = 24 * BLOCK - 5
    found = jax.device_get(choose_all(*padded(count, 50.0), jnp.int32(count)))
    again = jax.device_get(choose_all(*padded(count, -3.0), jnp.int32(count)))
    jax.tree.map(np.testing.assert_array_equal, found, again)
    logits = oracle.last_logits(q[:, :count], k[:, :count], LAST_Q, DIM**-0.5)
    mass = oracle.softmax(logits) * 2**30 / LAST_Q
    columns, diagonals = mass.sum(2), oracle.diagonal_sums(mass)
    for head in range(HEADS):
        verticals = oracle.top_p(
            columns[0, head],
            0.7 * 2**30,
            minimum=12,
            maximum=128,
            keep_crossing=True,
            forced=range(12),
        )
        slashes = oracle.top_p(
            diagonals[0, head], 0.7 * 2**30, minimum=5, maximum=20, keep_crossing=True
        )
        blocks = {0, 1} | oracle.block_diagonals(slashes, BLOCK, SEQ_LEN // BLOCK)
        assert listed(found["safe"], head) == (sorted(blocks), sorted(verticals))
    sums = np.where(np.isinf(logits), 0, logits)
    by_distance = oracle.diagonal_sums(sums)[0, 2]
    kept = sorted(range(count), key=lambda s: (s >= 4, -by_distance[s]))[:20]
    assert listed(found["fixed"], 2)[0] == sorted(
        {0} | oracle.block_diagonals(kept, BLOCK, SEQ_LEN // BLOCK)
    )


def test_rows_at_the_end_of_a_prompt_keep_all_of_their_blocks(heads):
    q, k = heads[2](300, 50.0)
    settings = dict(tau=0.3, probe_queries_per_block=4, block_size=BLOCK)

    @jax.jit
    def choose_both(q, k, valid_len):
        num_blocks = SEQ_LEN // BLOCK
        documents = Documents.padded(valid_len, SEQ_LEN, BLOCK)
        context = SelectionContext(jnp.arange(num_blocks), num_blocks, documents=documents)
        patterns = SampledRows(**settings), SampledRows(dense_suffix_tokens=30, **settings)
        return [select_pairs(pattern, q, k, context).index.bits for pattern in patterns]

    plain, ended = (
        np.asarray(sets.unpack(bits, SEQ_LEN // BLOCK)) for bits in choose_both(q, k, 300)
    )
    # Tokens 270 to 299 are in blocks 16 to 18; the rest is padding.
    others = np.delete(np.arange(SEQ_LEN // BLOCK), [16, 17, 18])
    np.testing.assert_array_equal(ended[:, :, others], plain[:, :, others])
    for row in (16, 17, 18):
        assert ended[:, :, row, : row + 1].all() and not ended[:, :, row, row + 1 :].any()
        assert not plain[:, :, row, : row + 1].all()


def test_attention_accepts_the_number_of_valid_tokens(heads):
    q, k = heads[2](300, 50.0)
    expected = choose_all(q, k, jnp.int32(300))["safe"]

    @jax.jit
    def run(q, k, documents):
        how = {"documents": documents, "return_residuals": True}
        return sparse_attention(q, k, k, PATTERNS["safe"], **how)[1].index

    def of_traced_length(q, k, valid_len):
        return run(q, k, Documents.padded(valid_len, SEQ_LEN, BLOCK))

    for index in (
        run(q, k, Documents.padded(300, SEQ_LEN, BLOCK)),
        jax.jit(of_traced_length)(q, k, 300),
    ):
        jax.tree.map(np.testing.assert_array_equal, index, expected)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (0, "valid_len=0 is not in 1 .. 512, the tokens of the sequence"),
        (2**32 + 5, "valid_len=4294967301 is not in 1 .. 512"),
        (513, "valid_len=513 is not in 1 .. 512"),
        (3.0, "valid_len=array.3.. must be a single integer"),
        ([3], "valid_len=array.*3.* must be a single integer"),
        ("a", "valid_len=array.'a'.* must be a single integer"),
    ],
)
def test_invalid_lengths_raise(wrong, message):
    with pytest.raises(UserError, match=message):
        Documents.padded(np.asarray(wrong), SEQ_LEN, BLOCK)


def test_a_prompt_may_have_fewer_tokens_than_probe_queries(heads):
    _, _, padded = heads
    found = jax.device_get(choose_all(*padded(7, 50.0), jnp.int32(7)))
    for name in PATTERNS:
        for head in range(HEADS):
            blocks, columns = listed(found[name], head)
            assert 0 in blocks and max(columns, default=0) < 7
    assert listed(found["safe"], 0)[1] == list(range(7))
