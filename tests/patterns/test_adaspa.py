"""AdaSpa's masses, sparsity levels and lists against their definitions, and its attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax import sparse_attention
from mtraining_jax.patterns.adaspa import AdaSpa
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.scores.exact_masses import exact_masses, recall
from pallas_kernels.reference import reference_attention
from tests.patterns import inputs, oracle

SEQ_LEN, BLOCK, HEADS, DIM = 320, 16, 6, 16
NUM_BLOCKS = SEQ_LEN // BLOCK
SHARDS = SelectionContext(jnp.arange(NUM_BLOCKS), NUM_BLOCKS, causal=False)
PATTERN = AdaSpa(0.6, first_blocks=1, last_blocks=1, block_size=BLOCK)


def sharp_and_flat():
    """Heads of different sharpness: the first ones concentrate more mass in few blocks."""
    q, k = inputs.random(0, 2, SEQ_LEN, HEADS, 2, DIM)
    return q * jnp.array([9.0, 6.0, 0.2, 0.1, 1.0, 0.5])[:, None], k


def definition(masses):
    """Lists of one batch entry, by sorting: bool [H, NB, NB]."""

    def largest(head, count):
        kept = np.zeros((NUM_BLOCKS, NUM_BLOCKS), bool)
        forced = {0, NUM_BLOCKS - 1}
        for i in range(NUM_BLOCKS):
            order = sorted(range(NUM_BLOCKS), key=lambda j: (j not in forced, -head[i, j], j))
            kept[i, order[:count]] = True
        return kept

    shares = []
    for head in masses:
        shares.append((head * largest(head, 8)).sum() / head.sum())  # 0.4 of 20
    able = min(sum(share > 0.8 for share in shares), HEADS // 2)
    assert 0 < able < HEADS // 2
    order = sorted(range(HEADS), key=lambda h: (-shares[h], h))
    found = []
    for number, head in enumerate(masses):
        place = order.index(number)
        # (1 + s) / 2 and (3 s - 1) / 2 of 20 blocks skipped.
        count = 4 if place < able else 12 if place >= HEADS - able else 8
        found.append(largest(head, count))
    return np.array(found)


def test_masses_and_lists_match_the_definition():
    q, k = sharp_and_flat()
    masses, index = jax.jit(
        lambda q, k: (exact_masses(q, k, SHARDS, BLOCK), PATTERN.select(q, k, SHARDS).index)
    )(q, k)
    masses, found = np.asarray(masses), np.asarray(index.to_mask(SEQ_LEN))
    of_keys = np.repeat(np.asarray(k, np.float64), HEADS // 2, axis=2)
    logits = np.einsum("bqhd,bkhd->bhqk", np.asarray(q, np.float64), of_keys) / DIM**0.5
    weights = oracle.softmax(logits).reshape(2, HEADS, NUM_BLOCKS, BLOCK, NUM_BLOCKS, BLOCK)
    np.testing.assert_allclose(masses, weights.sum(-1).mean(3), atol=1e-6)
    for b in range(2):
        wanted = np.repeat(np.repeat(definition(masses[b]), BLOCK, 1), BLOCK, 2)
        np.testing.assert_array_equal(found[b], wanted)


def test_attention_with_a_reused_index_covers_its_pairs():
    q, k = inputs.random(1, 2, SEQ_LEN, HEADS, 2, DIM)
    v = jnp.roll(k, 1, axis=1)
    out, (_, index) = sparse_attention(
        q, k, v, pattern=PATTERN, causal=False, return_residuals=True
    )
    again = sparse_attention(q, k, v, pattern=index, causal=False)
    wanted, _ = reference_attention(q, k, v, index.to_mask(SEQ_LEN))
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    np.testing.assert_array_equal(out, again)


def test_without_levels_all_rows_keep_equally_many_and_recall_is_their_mass():
    masses = np.random.default_rng(0).random((1, 4, NUM_BLOCKS, NUM_BLOCKS), np.float32)
    pattern = AdaSpa(0.75, adaptive=False, block_size=BLOCK)

    @jax.jit
    def measured(masses):
        kept = pattern.kept(masses)
        return kept, recall(masses, kept)

    kept, share = measured(masses)
    assert (kept.sum(-1) == 5).all()
    wanted = np.sort(masses, -1)[..., -5:].sum((-2, -1)) / masses.sum((-2, -1))
    np.testing.assert_allclose(share, wanted, rtol=1e-6)


def test_causal_attention_and_invalid_sizes_raise():
    q, k = inputs.random(0, 1, 64, 2, 1, DIM)
    with pytest.raises(ValueError, match="AdaSpa needs causal=False and .* use SampledRows"):
        sparse_attention(q, k, k, pattern=AdaSpa(block_size=16))
    with pytest.raises(ValueError, match="sparsity=0.2 must be a finite number .at least 0.333"):
        AdaSpa(sparsity=0.2)
