"""FlexPrefill against its definition in fp64, one head at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.documents import Documents
from mtraining_jax.patterns.flex_prefill import FlexPrefill
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.scores.flex_steps import _quotient
from tests.patterns import inputs, oracle

GAMMA, BUDGET, DIM = 0.5, 3, 16
CLOSE = 2e-6  # mass differences whose order rounding may change


@functools.partial(jax.jit, static_argnums=0)
def chosen(pattern, q, k, valid_len=None, documents=None):
    num_blocks = q.shape[1] // pattern.block_size
    if valid_len is not None:
        documents = Documents.padded(valid_len, q.shape[1], pattern.block_size)
    context = SelectionContext(jnp.arange(num_blocks), num_blocks, documents=documents)
    selection = pattern.select(q, k, context)
    mask = selection.index.computes(
        jnp.arange(num_blocks) * pattern.block_size, jnp.arange(num_blocks)
    )
    return mask[..., 0], selection.statistics["query_aware"]


def means(x, size):
    return np.array([x[i : i + size].mean(0) for i in range(0, len(x), size)])


def steps_one_to_three(q, k, size, aware):
    """Columns and diagonals: [NB, NB], and the masses of key blocks."""
    seq_len, num_blocks = len(q), -(-len(q) // size)
    rows, columns = np.arange(seq_len - size, seq_len)[:, None], np.arange(seq_len)
    logits = np.where(columns <= rows, q[-size:] @ k.T / DIM**0.5, -np.inf)
    weights = oracle.softmax(logits)
    seen = columns <= rows
    distance = np.bincount((rows - columns)[seen], weights[seen], seq_len) / size
    sets, of_blocks = [], []
    for score in (weights.mean(0), distance):
        tokens = (np.cumsum(np.sort(score)[::-1]) <= GAMMA).sum() + 1
        blocks = BUDGET if aware else max(tokens // size + 1, BUDGET)
        mass = np.pad(score, (0, -seq_len % size)).reshape(num_blocks, size).sum(1)
        of_blocks.append(mass.copy())
        mass[0] = np.inf
        sets.append(np.argsort(-mass, kind="stable")[:blocks])
    i = np.arange(num_blocks)
    listed = np.isin(i, sets[0])[None] | np.isin(i[:, None] - i, sets[1])
    return listed & np.tri(num_blocks, dtype=bool), of_blocks[0]


def distance(q, k, size, mass):
    pooled = oracle.softmax(q[-size:].mean(0) @ means(k, size).T / DIM**0.5)
    middle = (pooled + mass) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = [np.nansum(x * np.log(x / middle)) for x in (pooled, mass)]
    return np.sqrt(sum(parts) / 2)


def pooled_rows(q, k, size):
    num_blocks = -(-len(q) // size)
    logits = means(q, size) @ means(k, size).T / DIM**0.5
    return oracle.softmax(np.where(np.tri(num_blocks, dtype=bool), logits, -np.inf))


def pooled_lists(weights):
    """Step 5: one cut for the head, the entry that crosses it dropped; and the mass of the cut."""
    flat = weights.ravel()
    order = np.argsort(-flat, kind="stable")
    count = (np.cumsum(flat[order]) <= GAMMA * len(weights)).sum()
    kept = np.zeros(flat.size, bool)
    kept[order[:count]] = True
    return kept.reshape(weights.shape) & (weights > 0), flat[order[count]]


def check_head(found, aware, q, k, size, threshold):
    """Checks one head of one sequence, bool [NB, NB] and its kind, against the definition."""
    _, mass = steps_one_to_three(q, k, size, False)
    apart = distance(q, k, size, mass)
    assert abs(apart - threshold) > 1e-3 and aware in (None, apart < threshold)
    wanted, _ = steps_one_to_three(q, k, size, apart < threshold)
    either = np.zeros_like(wanted)
    if apart < threshold:
        weights = pooled_rows(q, k, size)
        kept, cut = pooled_lists(weights)
        wanted |= kept
        either = abs(weights - cut) < CLOSE
    assert not ((found != wanted) & ~either).any()
    assert either.sum() < 3 and found.diagonal().all()
    return apart < threshold


# For packs, with two passes of the estimate per block.
SIZE, NUM_BLOCKS, THRESHOLD = 128, 16, 0.0945


def pattern_of(size, threshold):
    return FlexPrefill(GAMMA, threshold, BUDGET * size, min_sparse_tokens=0, block_size=size)


PACK = pattern_of(SIZE, THRESHOLD)


@pytest.mark.parametrize(("size", "num_blocks", "threshold"), [(16, 24, 0.1), (SIZE, 6, THRESHOLD)])
def test_both_kinds_of_heads_match_the_definition(size, num_blocks, threshold):
    q, k = inputs.random(0, 2, size * num_blocks, 4, 2, DIM)
    found, aware = jax.device_get(chosen(pattern_of(size, threshold), q, k))
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    for b, h in np.ndindex(2, 4):
        check_head(found[b, h], aware[b, h], q[b, :, h], k[b, :, h // 2], size, threshold)
    assert set(np.ravel(aware)) == {0.0, 1.0}


# One of the documents is dense, and the last block of another is incomplete.
LENGTHS = [[768, 130, 768], [1142]]
SPANS = [[(0, 6), (6, 8), (8, 14)], [(0, 9)]]
DOCUMENTS = Documents.from_lengths(LENGTHS, NUM_BLOCKS * SIZE, SIZE)


@functools.cache
def pack():
    return inputs.random(0, 2, NUM_BLOCKS * SIZE, 4, 2, DIM)


def test_each_document_of_a_pack_matches_the_definition():
    found, shares = jax.device_get(chosen(PACK, *pack(), documents=DOCUMENTS))
    q, k = (np.asarray(x, np.float64) for x in pack())
    kinds = np.zeros((2, 4, 3))
    outside = np.ones_like(found[0, 0])
    for b, h in np.ndindex(2, 4):
        outside[:] = True
        for n, ((first, end), length) in enumerate(zip(SPANS[b], LENGTHS[b], strict=True)):
            own, tokens = slice(first, end), slice(first * SIZE, first * SIZE + length)
            outside[own, own] = False
            if end - first <= BUDGET:
                np.testing.assert_array_equal(found[b, h, own, own], np.tri(end - first))
                continue
            one = q[b, tokens, h], k[b, tokens, h // 2]
            kinds[b, h, n] = check_head(found[b, h, own, own], None, *one, SIZE, THRESHOLD)
        assert not found[b, h][outside].any()
    np.testing.assert_allclose(shares, kinds.sum(-1) / [[2], [1]])
    # Heads of both kinds, and one of a different kind in each document.
    assert set(np.ravel(shares)) == {0.0, 0.5, 1.0}


def test_short_sequences_are_dense():
    q, k = inputs.random(0, 1, 64, 2, 1, DIM)
    found, _ = chosen(FlexPrefill(min_budget=49, block_size=16), q, k)
    np.testing.assert_array_equal(found, np.broadcast_to(np.tri(4, dtype=bool), found.shape))


def test_long_division_is_exact():
    rng = np.random.default_rng(0)
    total = rng.integers(0, 2**46, 200)
    by = rng.integers(1, 2**31, 200) >> rng.integers(0, 31, 200)
    by = np.maximum(by, 1)
    limbs = [jnp.asarray(x, jnp.uint32) for x in (total >> 16, total & 0xFFFF)]
    found = jax.jit(_quotient)(*limbs, jnp.asarray(by, jnp.uint32))
    np.testing.assert_array_equal(found, np.minimum(total // by, 2**30))


def test_invalid_budgets_raise():
    with pytest.raises(ValueError, match="max_budget=5 must be at least min_budget=512"):
        FlexPrefill(max_budget=5)
