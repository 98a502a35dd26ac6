"""Documents that begin at any token, moved to whole blocks: as if each were alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax import Dense, Documents, SampledRows, realign, sparse_attention
from pallas_kernels.reference import reference_attention

BATCH, TOKENS, HEADS, KV_HEADS, DIM, BLOCK = 2, 64, 4, 2, 8, 16
# Lengths of documents and of the padding at the end; the second sequence has no third document.
LENGTHS = ((5, 1, 40, 18), (33, 21, 0, 10))
IDS = np.stack([np.repeat([1, 2, 3, 0], lengths) for lengths in LENGTHS])
DENSE = Dense(BLOCK)
ROWS = SampledRows(block_size=4, tau=0.5, probe_queries_per_block=4, min_sparse_tokens=0)


@functools.cache
def inputs():
    rng = np.random.default_rng(0)
    heads = HEADS, KV_HEADS, KV_HEADS, HEADS
    return [jnp.asarray(rng.normal(size=(BATCH, TOKENS, n, DIM)), jnp.float32) for n in heads]


def attend(q, k, v, ids, pattern=DENSE, **options):
    """Attention within the runs of ids."""
    options = dict(max_documents=4, block_size=pattern.block_size) | options
    documents, to_blocks, from_blocks = realign(ids, **options)
    q, k, v = map(to_blocks, (q, k, v))
    return from_blocks(sparse_attention(q, k, v, pattern, documents=documents))


def test_documents_are_those_of_their_lengths():
    documents, to_blocks, from_blocks = realign(jnp.asarray(IDS), 3, block_size=BLOCK)
    # 64 tokens, and up to 15 more for each of three documents.
    wanted = Documents.from_lengths([[5, 1, 40], [33, 21]], 96, BLOCK)
    jax.tree.map(np.testing.assert_array_equal, documents, wanted)
    x = jnp.arange(1, 1 + BATCH * TOKENS).reshape(BATCH, TOKENS)
    moved = np.asarray(to_blocks(x))
    np.testing.assert_array_equal(moved[0, :17], [*range(1, 6), *[0] * 11, 6])
    assert (np.sort(moved[moved > 0]) == np.asarray(x)[IDS > 0]).all()
    np.testing.assert_array_equal(from_blocks(to_blocks(x * 1.0)), np.where(IDS > 0, x, 0))


@pytest.mark.parametrize("ids", [IDS, IDS[:1]], ids=["each", "all"])
def test_attention_and_gradients_stay_within_documents(ids):
    *arrays, weights = inputs()
    same = np.tril(ids[:, :, None] == ids[:, None])

    def results(attention):
        @functools.partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
        def weighed(q, k, v):
            out = attention(q, k, v)
            return (out * weights).sum(), out

        return jax.tree.leaves(jax.jit(weighed)(*arrays))

    def dense(q, k, v):
        mask = jnp.broadcast_to(same[:, None], (BATCH, HEADS, TOKENS, TOKENS))
        return reference_attention(q, k, v, mask)[0]

    found = results(functools.partial(attend, ids=jnp.asarray(ids), padding=None))
    for x, y in zip(found, results(dense), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_each_document_selects_as_if_alone_and_padding_is_zero():
    q, k, v, _ = inputs()
    # Traced ids: one program for any packing.
    out = np.asarray(jax.jit(functools.partial(attend, pattern=ROWS))(q, k, v, IDS))
    assert (out[IDS == 0] == 0).all()
    for row, start, length in ((0, 6, 40), (1, 0, 33)):
        padded = [
            jnp.zeros((1, TOKENS, *x.shape[2:])).at[0, :length].set(x[row, start:][:length])
            for x in (q, k, v)
        ]
        document = Documents.padded(length, TOKENS, 4)
        alone = sparse_attention(*padded, ROWS, documents=document)[0, :length]
        np.testing.assert_allclose(out[row, start:][:length], alone, rtol=1e-4, atol=1e-5)
        every = sparse_attention(*padded, DENSE)[0, :length]
        assert np.abs(alone - every).max() > 0.1  # some pairs are not selected


def test_sequences_with_too_many_documents_are_nan():
    out = attend(*inputs()[:3], jnp.asarray(IDS), max_documents=2)
    assert np.isnan(out[0]).all() and not np.isnan(out[1]).any()


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (IDS[0], {}, r"segment_ids is int32 \[64\]; expected integers \[batch, tokens\]"),
        (IDS * 1.0, {}, r"segment_ids is float32 \[2, 64\]"),
        (IDS, {"max_documents": 0}, "max_documents=0 must be an integer, at least 1"),
        (IDS, {"block_size": 1.5}, "block_size=1.5 must be an integer, at least 1"),
    ],
)
def test_invalid_arguments_raise(ids, options, message):
    with pytest.raises(ValueError, match=message):
        realign(ids, **dict(max_documents=4) | options)
