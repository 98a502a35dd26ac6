import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mtraining_jax.selection.rules.joint_rule import JointRule, kept_together
from mtraining_jax.selection.spans import OneSpan
from tests.selection import joint_oracle

SIZE, BLOCKS, LAST_Q = 4, 7, 3
TOKENS = SIZE * BLOCKS
COMMON = dict(max_verticals=6, sink_tokens=2, local_blocks=1, num_probe_queries=LAST_Q)
RULES = {
    "mass": JointRule(0.8, 0.0, 1.0, **COMMON),
    "price": JointRule(1.0, 0.05, 1.0, **COMMON),
    "density": JointRule(1.0, 0.0, 0.5, **COMMON),
    "half of it the nearest": JointRule(1.0, 0.0, 0.7, **COMMON, local_fraction=0.5),
    "no limit": JointRule(1.0, 0.0, 1.0, **COMMON | dict(max_verticals=TOKENS)),
    # Forced entries exceed the limit.
    "nothing but what is forced": JointRule(0.9, 0.0, 0.01, **COMMON | dict(local_blocks=3)),
}


@functools.partial(jax.jit, static_argnames="rule")
def run(columns, diagonals, tokens, rule):
    return kept_together(columns, diagonals, OneSpan(BLOCKS, tokens), rule)


def scores():
    """Few distinct masses create ties; others concentrate nearly all mass in one entry."""
    masses = st.one_of(st.integers(0, 3), st.integers(0, 2**30 // TOKENS))
    return arrays(np.int32, (2, 1, BLOCKS, SIZE), elements=masses)


def assert_follows(by_distance, tokens, rule):
    columns, diagonals = jax.device_get(run(*by_distance, tokens, rule))
    of_columns, of_diagonals = by_distance.reshape(2, TOKENS)
    found = set(np.flatnonzero(columns[0]).tolist()), set(np.flatnonzero(diagonals[0]).tolist())
    assert found == joint_oracle.keep(of_columns, of_diagonals, tokens, SIZE, rule)
    return found


@pytest.mark.parametrize("name", RULES)
def test_matches_counting_every_pair(name):
    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @given(scores(), st.sampled_from([TOKENS, TOKENS - 2, TOKENS - 4, 9, 2]))
    def check(by_distance, tokens):
        by_distance = np.where(np.arange(TOKENS).reshape(BLOCKS, SIZE) < tokens, by_distance, 0)
        assert_follows(by_distance, np.int32(tokens), RULES[name])

    check()


def masses_of(probabilities):
    """Scores int32 [2, 1, NB, g] of the rows [LAST_Q, S] of the last queries."""
    columns, diagonals = probabilities.mean(0), np.zeros(TOKENS)
    for row, at in zip(probabilities, range(TOKENS - LAST_Q, TOKENS), strict=True):
        diagonals[: at + 1] += row[at::-1] / LAST_Q
    both = np.round(np.stack([columns, diagonals]) * 2**30).astype(np.int32)
    return both.reshape(2, 1, BLOCKS, SIZE)


def rows_of(heavy, distances=(), rest=0.04):
    """Attention of the last queries to some tokens, and at some distances."""
    rows = np.tril(np.full((LAST_Q, TOKENS), rest / TOKENS), TOKENS - LAST_Q)
    for token in heavy:
        rows[:, token] += 1
    for row, at in zip(rows, range(TOKENS - LAST_Q, TOKENS), strict=True):
        row[[at - distance for distance in distances]] += 1
    return rows / rows.sum(-1, keepdims=True)


def test_a_column_is_kept_as_a_column_and_a_diagonal_as_a_diagonal():
    rule = RULES["mass"]
    far = 5 * SIZE + 1
    columns, diagonals = assert_follows(masses_of(rows_of([10, 13])), TOKENS, rule)
    assert columns == {0, 1, 10, 13} and diagonals == {0}
    columns, diagonals = assert_follows(masses_of(rows_of([], [9, far])), TOKENS, rule)
    assert columns == {0, 1} and diagonals >= {0, 2, 5}


def test_holds_at_least_the_mass_of_a_window_of_equal_cost():
    rng = np.random.default_rng(0)
    replaced = 0
    for seed in range(40):
        shape = 2, 1, BLOCKS, SIZE
        by_distance = (rng.pareto(1.2, shape) * 2**16).clip(0, 2**24).astype(np.int32)
        rule = RULES[("mass", "price", "density")[seed % 3]]
        kept = assert_follows(by_distance, TOKENS, rule)
        masses, sinks = by_distance[0].reshape(-1), set(range(rule.sink_tokens))
        cost = joint_oracle.cost(kept, TOKENS, SIZE)
        window = joint_oracle.widest_window(cost, TOKENS, SIZE, sinks)
        both = [joint_oracle.held(x, masses, TOKENS, SIZE) for x in (kept, window)]
        assert both[0] >= both[1]
        replaced += kept == window
    assert 0 < replaced < 40
