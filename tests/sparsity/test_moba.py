"""MoBA's choice for each token against its definition, and attention over it on a ring."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax import sparse_attention, stripe
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import make_mesh
from mtraining_jax.sparsity import BlockTopK, MoBA, Shards, density
from pallas_kernels.reference import mask_from_index, reference_attention
from tests.sparsity import inputs

SEQ_LEN, BLOCK, CHUNK, TOP_K, DIM = 176, 8, 32, 3, 16  # the last chunk is half a one
PATTERN = MoBA(CHUNK, TOP_K, BLOCK)


@jax.jit
def chosen(q, k):
    num_blocks = q.shape[1] // BLOCK
    return PATTERN.choose(q, k, Shards(jnp.arange(num_blocks), num_blocks)).index


def wanted(q, k):
    """The definition for one head: bool [S, NC], and the gate."""
    chunks = -(-len(q) // CHUNK)
    means = np.array([k[c * CHUNK : (c + 1) * CHUNK].mean(0) for c in range(chunks)])
    gate = q @ means.T
    seen = np.zeros((len(q), chunks), bool)
    for t in range(len(q)):
        own = t // CHUNK
        seen[t, own] = True
        seen[t, sorted(range(own), key=lambda c: (-gate[t, c], c))[: TOP_K - 1]] = True
    return seen


def test_each_token_chooses_as_the_definition_says():
    q, k = inputs.random(0, 2, SEQ_LEN, 4, 2, DIM)
    # Two chunks of equal means, of which the first is taken.
    k = k.at[:, 64:96].set(k[:, 32:64])
    index = chosen(q, k)
    mask = np.asarray(mask_from_index(index, SEQ_LEN))
    causal = np.tri(SEQ_LEN, dtype=bool)
    for b, h in np.ndindex(2, 4):
        seen = wanted(np.asarray(q)[b, :, h], np.asarray(k)[b, :, h // 2])
        expected = np.repeat(seen, CHUNK, axis=1)[:, :SEQ_LEN] & causal
        np.testing.assert_array_equal(mask[b, h], expected)
    found = np.asarray(density(index, SEQ_LEN))
    np.testing.assert_allclose(found, PATTERN.density(SEQ_LEN), rtol=1e-6)


def test_no_token_is_influenced_by_later_ones():
    q, k = inputs.random(0, 1, SEQ_LEN, 2, 1, DIM)
    at = 101  # in the middle of a chunk
    other = chosen(q.at[:, at:].multiply(-3.0), k.at[:, at:].multiply(-3.0))
    first, second = (
        np.asarray(x.chosen).reshape(1, 2, SEQ_LEN, -1)[:, :, :at] for x in (chosen(q, k), other)
    )
    np.testing.assert_array_equal(first, second)


def test_a_ring_computes_what_one_device_does():
    seq_len = 128
    q, k = inputs.random(3, 2, seq_len, 4, 2, DIM)
    v = jnp.roll(k, 1, axis=1)
    mesh = make_mesh(1, 2, 2)
    layout = Layout("striped", seq_len, 4, BLOCK, 2)

    def total(q, k, v, **where):
        out, lse = sparse_attention(q, k, v, pattern=PATTERN, return_lse=True, **where)
        return jnp.sin(out).sum() + jnp.cos(lse).sum(), out

    def oracle(q, k, v):
        out, lse = reference_attention(q, k, v, mask_from_index(chosen(q, k), seq_len))
        return jnp.sin(out).sum() + jnp.cos(lse).sum(), out

    run = functools.partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
    dealt = [stripe(x, layout) for x in (q, k, v)]
    found = jax.jit(run(functools.partial(total, mesh=mesh, layout=layout)))(*dealt)
    (value, out), grads = jax.jit(run(oracle))(q, k, v)
    (found_value, found_out), found_grads = found
    np.testing.assert_allclose(found_value, value, rtol=1e-5)
    for got, want in zip((found_out, *found_grads), (out, *grads), strict=True):
        np.testing.assert_allclose(got, stripe(want, layout), atol=1e-4)


def test_blocks_are_chosen_by_means_of_queries_and_keys():
    num_blocks, most = SEQ_LEN // BLOCK, 4
    q, k = inputs.random(5, 2, SEQ_LEN, 4, 2, DIM)
    rows = jnp.arange(num_blocks)
    pattern = BlockTopK(most, BLOCK)
    index = jax.jit(lambda q, k: pattern.choose(q, k, Shards(rows, num_blocks)).index)(q, k)
    found = np.asarray(index.computes(rows * BLOCK, rows))[..., 0]
    for b, h in np.ndindex(2, 4):
        queries, keys = (
            np.asarray(x, np.float64)[b, :, head].reshape(num_blocks, BLOCK, DIM).mean(1)
            for x, head in ((q, h), (k, h // 2))
        )
        products = queries @ keys.T
        for row in range(num_blocks):
            best = sorted(range(row), key=lambda c: (-products[row, c], c))[: most - 1]
            assert set(np.flatnonzero(found[b, h, row])) == {row, *best}


def test_padding_at_the_end_changes_no_block_that_counts():
    q, k = inputs.random(6, 1, SEQ_LEN, 2, 1, DIM)
    valid, rows = 83, jnp.arange(SEQ_LEN // BLOCK)  # three tokens of block 10

    @jax.jit
    def lists(q, k):
        shards = Shards(rows, len(rows), valid_len=jnp.int32(valid))
        return BlockTopK(4, BLOCK).choose(q, k, shards).index.bits[:, :, :11]

    other = q.at[:, valid:].set(9.0), k.at[:, valid:].set(-9.0)
    np.testing.assert_array_equal(lists(q, k), lists(*other))


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="chunk_size=100 must be a multiple of block_size=128"):
        MoBA(chunk_size=100)
