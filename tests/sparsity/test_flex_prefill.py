"""FlexPrefill against its definition in fp64, one head at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.sparsity import FlexPrefill, Shards
from mtraining_jax.sparsity.flex_steps import _quotient
from tests.sparsity import inputs, oracle

GAMMA, BUDGET, DIM = 0.5, 3, 16
CLOSE = 2e-6  # of masses: what rounding may put in either order


@functools.partial(jax.jit, static_argnums=0)
def chosen(pattern, q, k, valid_len=None):
    num_blocks = q.shape[1] // pattern.block_size
    shards = Shards(jnp.arange(num_blocks), num_blocks, valid_len=valid_len)
    choice = pattern.choose(q, k, shards)
    mask = choice.index.computes(
        jnp.arange(num_blocks) * pattern.block_size, jnp.arange(num_blocks)
    )
    return mask[..., 0], choice.statistics["query_aware"]


def means(x, size):
    return x.reshape(-1, size, x.shape[1]).mean(1)


def steps_one_to_three(q, k, size, aware):
    """Columns and diagonals: [NB, NB], and the masses of key blocks."""
    seq_len, num_blocks = len(q), len(q) // size
    rows, columns = np.arange(seq_len - size, seq_len)[:, None], np.arange(seq_len)
    logits = np.where(columns <= rows, q[-size:] @ k.T / DIM**0.5, -np.inf)
    weights = oracle.softmax(logits)
    seen = columns <= rows
    distance = np.bincount((rows - columns)[seen], weights[seen], seq_len) / size
    sets, of_blocks = [], []
    for score in (weights.mean(0), distance):
        tokens = (np.cumsum(np.sort(score)[::-1]) <= GAMMA).sum() + 1
        blocks = BUDGET if aware else max(tokens // size + 1, BUDGET)
        mass = score.reshape(num_blocks, size).sum(1)
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
    num_blocks = len(q) // size
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


# Blocks of one pass of the estimate, and of two.
@pytest.mark.parametrize(("size", "num_blocks", "threshold"), [(16, 24, 0.1), (128, 6, 0.095)])
def test_both_kinds_of_heads_are_those_of_the_definition(size, num_blocks, threshold):
    q, k = inputs.random(0, 2, size * num_blocks, 4, 2, DIM)
    pattern = FlexPrefill(GAMMA, threshold, BUDGET * size, block_size=size)
    found, aware = jax.device_get(chosen(pattern, q, k))
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    for b, h in np.ndindex(2, 4):
        one_q, one_k = q[b, :, h], k[b, :, h // 2]
        _, mass = steps_one_to_three(one_q, one_k, size, False)
        apart = distance(one_q, one_k, size, mass)
        assert abs(apart - threshold) > 1e-3 and aware[b, h] == (apart < threshold)
        wanted, _ = steps_one_to_three(one_q, one_k, size, aware[b, h])
        either = np.zeros_like(wanted)
        if aware[b, h]:
            weights = pooled_rows(one_q, one_k, size)
            kept, cut = pooled_lists(weights)
            wanted |= kept
            either = abs(weights - cut) < CLOSE
        assert not ((found[b, h] != wanted) & ~either).any()
        assert either.sum() < 3 and found[b, h].diagonal().all()
    assert set(np.ravel(aware)) == {0.0, 1.0}


def test_padding_at_the_end_changes_no_list():
    size, num_blocks, valid = 16, 24, 16 * 19 + 5
    pattern = FlexPrefill(GAMMA, 0.1, BUDGET * size, block_size=size)
    q, k = inputs.random(1, 1, size * num_blocks, 2, 1, DIM)
    found, aware = chosen(pattern, q, k, jnp.int32(valid))
    other = chosen(pattern, q.at[:, valid:].set(7.0), k.at[:, valid:].set(-7.0), jnp.int32(valid))
    np.testing.assert_array_equal(found[:, :, :20], other[0][:, :, :20])
    np.testing.assert_array_equal(aware, other[1])
    whole = chosen(pattern, q[:, : 16 * 19], k[:, : 16 * 19])
    cut = chosen(pattern, q, k, jnp.int32(16 * 19))
    np.testing.assert_array_equal(whole[0], cut[0][:, :, :19, :19])


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


def test_budgets_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="max_budget=5 must not be below min_budget=512"):
        FlexPrefill(max_budget=5)
