"""MoBA's selection for each token against its definition, and its attention on a ring."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax import Sharding, sparse_attention, stripe
from mtraining_jax.documents import Documents
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import make_mesh
from mtraining_jax.patterns.block_topk import BlockTopK
from mtraining_jax.patterns.moba import MoBA
from mtraining_jax.selection import collectives
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.metrics import density
from mtraining_jax.tools.plan.pattern_costs import expected_density
from pallas_kernels.reference import reference_attention
from tests.attention.inputs import with_lse
from tests.patterns import inputs

SEQ_LEN, BLOCK, CHUNK, TOP_K, DIM = 176, 8, 32, 3, 16  # the last chunk is half full
PATTERN = MoBA(CHUNK, TOP_K, BLOCK)


# Documents that begin within the chunks of the sequence, one with five chunks (a query sees only
# some); one token; then padding. The other sequence has a single document.
LENGTHS = [[9, 140, 1], [SEQ_LEN - 3]]
SPANS = [[(0, 16), (16, 160), (160, 168)], [(0, SEQ_LEN)]]
DOCUMENTS = Documents.from_lengths(LENGTHS, SEQ_LEN, BLOCK)


@functools.partial(jax.jit, static_argnames="pattern")
def chosen(q, k, documents=None, pattern=PATTERN):
    num_blocks = q.shape[1] // BLOCK
    return pattern.select(
        q, k, SelectionContext(jnp.arange(num_blocks), num_blocks, documents=documents)
    ).index


def wanted(q, k, chunk=CHUNK):
    """The definition for one head: bool [S, NC]."""
    chunks = -(-len(q) // chunk)
    means = np.array([k[c * chunk : (c + 1) * chunk].mean(0) for c in range(chunks)])
    gate = q @ means.T
    seen = np.zeros((len(q), chunks), bool)
    for t in range(len(q)):
        own = t // chunk
        seen[t, own] = True
        seen[t, sorted(range(own), key=lambda c: (-gate[t, c], c))[: TOP_K - 1]] = True
    return seen


# With 129 chunks, a step computes two rows of blocks.
@pytest.mark.parametrize(("seq_len", "chunk"), [(SEQ_LEN, CHUNK), (129 * BLOCK, BLOCK)])
def test_each_token_selects_by_the_definition(seq_len, chunk):
    q, k = inputs.random(0, 2, seq_len, 4, 2, DIM)
    if chunk == CHUNK:  # two chunks with equal means: the first is selected
        k = k.at[:, 64:96].set(k[:, 32:64])
    pattern = MoBA(chunk, TOP_K, BLOCK)
    index = chosen(q, k, pattern=pattern)
    mask = np.asarray(index.to_mask(seq_len))
    causal = np.tri(seq_len, dtype=bool)
    for b, h in np.ndindex(2, 4):
        seen = wanted(np.asarray(q)[b, :, h], np.asarray(k)[b, :, h // 2], chunk)
        expected = np.repeat(seen, chunk, axis=1)[:, :seq_len] & causal
        np.testing.assert_array_equal(mask[b, h], expected)
    found = np.asarray(density(index, seq_len))
    np.testing.assert_allclose(found, expected_density(pattern, seq_len)[0], rtol=1e-6)


def test_documents_select_among_chunks_that_begin_with_each():
    q, k = inputs.random(0, 2, SEQ_LEN, 4, 2, DIM)
    index = chosen(q, k, DOCUMENTS)
    expected, causal = np.zeros((2, 4, SEQ_LEN, SEQ_LEN), bool), np.tri(SEQ_LEN, dtype=bool)
    for b, h in np.ndindex(2, 4):
        for start, end in SPANS[b]:
            own = slice(start, end)
            seen = wanted(np.asarray(q)[b, own, h], np.asarray(k)[b, own, h // 2])
            pairs = np.repeat(seen, CHUNK, axis=1)[:, : end - start]
            expected[b, h, own, own] = pairs & causal[own, own]

    @jax.jit
    def counted(index):
        share = density(index, SEQ_LEN, documents=DOCUMENTS)
        counts = index.computed_pairs(SEQ_LEN), index.pairs_of_rows(), index.executed_pairs(SEQ_LEN)
        return index.to_mask(SEQ_LEN), share, *counts

    mask, share, computed, of_blocks, executed = counted(index)
    np.testing.assert_array_equal(mask, expected)
    np.testing.assert_array_equal(index.chosen[1], chosen(q, k).chosen[1])
    pairs = expected.sum(-1)
    np.testing.assert_array_equal(computed, pairs.sum(-1))
    of_rows = pairs.reshape(2, 4, -1, BLOCK).sum(-1)
    np.testing.assert_array_equal(of_blocks, of_rows)
    triangles = [[sum((e - s) * (e - s + 1) // 2 for s, e in own)] for own in SPANS]
    np.testing.assert_allclose(share, pairs.sum(-1) / triangles, rtol=1e-6)
    # Tiles of the queries that see a chunk, rounded up, and the own chunk of each.
    tiles = np.zeros((2, 4))
    for b, h in np.ndindex(2, 4):
        for start, end in SPANS[b]:
            for row in range(start, end, BLOCK):
                tiles[b, h] += (row - start) // BLOCK % (CHUNK // BLOCK) + 1
            for chunk in range(start, end - CHUNK, CHUNK):
                queries = expected[b, h, chunk + CHUNK : end, chunk].sum()
                tiles[b, h] += -(-queries // BLOCK) * (CHUNK // BLOCK)
    np.testing.assert_array_equal(executed, tiles * BLOCK**2)


def test_eleven_ranks_select_in_documents_the_same_as_one_device():
    ranks = 11
    q, k = inputs.random(0, 2, SEQ_LEN, 4, 2, DIM)
    layout = Layout("striped", SEQ_LEN, ranks, BLOCK)
    rows = np.stack([layout.block_ids(rank) for rank in range(ranks)]).astype(np.int32)

    def on_rank(q, k, rows):
        where = SelectionContext(rows, SEQ_LEN // BLOCK, ("rank",), documents=DOCUMENTS)
        index = PATTERN.select(q, k, where).index
        held = collectives.rows_of(rows, ("rank",))
        return index, index.computed_pairs(SEQ_LEN, held), index.pairs_of_rows(held)

    blocks = [x.reshape(2, -1, BLOCK, *x.shape[2:])[:, rows] for x in (q, k)]
    sharded = [jnp.moveaxis(x, 1, 0).reshape(ranks, 2, -1, *x.shape[4:]) for x in blocks]
    found, pairs, of_rows = jax.jit(jax.vmap(on_rank, axis_name="rank"))(*sharded, rows)
    one = chosen(q, k, DOCUMENTS)
    wanted = one.chosen, one.first, one.pairs_of_rows()
    for got, want in zip((found.chosen, found.first, of_rows), wanted, strict=True):
        np.testing.assert_array_equal(np.moveaxis(got, 0, 2), np.asarray(want)[:, :, rows])
    for of_rank in pairs:
        np.testing.assert_array_equal(of_rank, one.computed_pairs(SEQ_LEN))


@pytest.mark.slow  # test_patterns.py has its index on ranks, tests/golden its attention in packs
def test_a_ring_matches_one_device():
    seq_len = 128
    documents = Documents.from_lengths([[9, 77, 1], [24, 50]], seq_len, BLOCK)
    q, k = inputs.random(3, 2, seq_len, 4, 2, DIM)
    v = jnp.roll(k, 1, axis=1)
    mesh = make_mesh(1, 2, 2)
    layout = Layout("striped", seq_len, 4, BLOCK, 2)

    def total(q, k, v, **where):
        out, lse = with_lse(q, k, v, pattern=PATTERN, documents=documents, **where)
        # Padding rows see nothing: their lse is -inf.
        return jnp.sin(out).sum() + jnp.cos(jnp.maximum(lse, -9)).sum(), (out, lse)

    def oracle(q, k, v):
        mask = chosen(q, k, documents).to_mask(seq_len)
        out, lse = reference_attention(q, k, v, mask)
        return jnp.sin(out).sum() + jnp.cos(jnp.maximum(lse, -9)).sum(), (out, lse)

    run = functools.partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
    sharded = [stripe(x, layout) for x in (q, k, v)]
    found = jax.jit(run(functools.partial(total, sharding=Sharding(mesh, order=layout))))(*sharded)
    (_, (out, lse)), grads = jax.jit(run(oracle))(q, k, v)
    (_, (found_out, found_lse)), found_grads = found
    np.testing.assert_allclose(found_lse, stripe(lse, layout, axis=2), atol=1e-5)
    for got, want in zip((found_out, *found_grads), (out, *grads), strict=True):
        np.testing.assert_allclose(got, stripe(want, layout), atol=1e-4)


def test_own_and_past_chunks_have_the_scale_of_the_call():
    (q, k), (_, v) = (inputs.random(seed, 1, SEQ_LEN, 4, 2, DIM) for seed in (0, 1))
    dout = jnp.ones_like(q)

    @functools.partial(jax.jit, static_argnums=3)
    def run(q, k, v, scale):
        attend = functools.partial(sparse_attention, pattern=PATTERN, scale=scale)
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(dout)

    # Twice the queries and half the scale: the same logits, exactly.
    out, dq, dk, dv = run(q, k, v, 0.5)
    other, half_dq, same_dk, same_dv = run(2 * q, k, v, 0.25)
    for x, y in ((out, other), (dq, 2 * half_dq), (dk, same_dk), (dv, same_dv)):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_blocks_are_selected_by_means_of_queries_and_keys():
    num_blocks, most = SEQ_LEN // BLOCK, 4
    q, k = inputs.random(5, 2, SEQ_LEN, 4, 2, DIM)
    rows = jnp.arange(num_blocks)
    pattern = BlockTopK(most, BLOCK)
    index = jax.jit(lambda q, k: pattern.select(q, k, SelectionContext(rows, num_blocks)).index)(
        q, k
    )
    found = np.asarray(index.computes(rows * BLOCK, rows))[..., 0]
    for b, h in np.ndindex(2, 4):
        queries, keys = (
            np.asarray(x, np.float64)[b, :, head].reshape(num_blocks, BLOCK, DIM).mean(1)
            for x, head in ((q, h), (k, h // 2))
        )
        products = queries @ keys.T
        most_dense = (pattern.min_sparse_tokens - 1) // BLOCK
        whole = found[b, h].sum(-1) == np.arange(num_blocks) + 1
        np.testing.assert_array_equal(whole, np.arange(num_blocks) < most_dense)
        for row in range(num_blocks):
            best = sorted(range(row), key=lambda c: (-products[row, c], c))[: most - 1]
            assert set(np.flatnonzero(found[b, h, row])) == {row, *best}


def test_sequences_of_at_most_top_k_chunks_are_dense():
    most = PATTERN.min_sparse_tokens - 1
    assert expected_density(PATTERN, most)[0] == 1 > expected_density(PATTERN, most + BLOCK)[0]


def test_invalid_sizes_raise():
    with pytest.raises(ValueError, match="chunk_size=100 must be a multiple of block_size=128"):
        MoBA(chunk_size=100)
