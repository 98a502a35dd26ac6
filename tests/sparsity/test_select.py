import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mtraining_jax.sparsity import select
from tests.sparsity import oracle

BLOCKS, SIZE = 6, 8
TOKENS = BLOCKS * SIZE
FORCED = 1 << 30
MASS = FORCED - 1
FILL = 1000


@functools.partial(jax.jit, static_argnames=("with_mass", "keep_crossing"))
def run(keys, minimum, maximum, target, with_mass, keep_crossing):
    rule = select.Rule(
        minimum=minimum,
        maximum=maximum,
        mass_target=target if with_mass else None,
        mass_mask=MASS,
        keep_crossing=keep_crossing,
    )
    kept, count = select.kept_entries(keys, rule)
    return kept, count, select.ascending_entries(kept, TOKENS, FILL)


@settings(max_examples=150, deadline=None)
@given(
    # Few distinct scores make many ties; the last range makes keys above bit 30 and zeros.
    scores=st.one_of(
        st.lists(st.integers(0, 3), min_size=TOKENS, max_size=TOKENS),
        st.lists(st.integers(0, FORCED // TOKENS), min_size=TOKENS, max_size=TOKENS),
    ),
    num_forced=st.integers(0, 5),
    minimum=st.integers(0, TOKENS),
    maximum=st.integers(0, TOKENS),
    share=st.floats(0, 1.05),
    keep_crossing=st.booleans(),
)
@example([1] * TOKENS, 0, 0, TOKENS, 0.5, True)
@example([0] * TOKENS, 5, 0, TOKENS, 1.0, False)
def test_keeps_what_taking_one_by_one_keeps(
    scores, num_forced, minimum, maximum, share, keep_crossing
):
    target = max(1, round(sum(scores) * share))
    minimum = min(max(minimum, num_forced), maximum)
    expected = oracle.top_p(
        scores,
        target,
        minimum=minimum,
        maximum=maximum,
        keep_crossing=keep_crossing,
        forced=range(num_forced),
    )
    keys = np.array(scores, np.uint32)
    keys[:num_forced] += FORCED
    keys = keys.reshape(BLOCKS, SIZE)
    kept, count, listed = run(keys, minimum, maximum, target, True, keep_crossing)
    assert oracle.entries(listed, count) == sorted(expected)
    assert set(np.flatnonzero(kept).tolist()) == expected
    assert (np.asarray(listed)[len(expected) :] == FILL).all()


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(
        st.sampled_from([-np.inf, -1.5, -1e-30, -0.0, 0.0, 1e-30, 1.0, 3e38, np.inf]),
        min_size=TOKENS,
        max_size=TOKENS,
    ),
    budget=st.integers(0, TOKENS),
)
def test_budgets_keep_the_largest_floats(values, budget):
    ranked = sorted(range(TOKENS), key=lambda i: (-values[i], i))[:budget]
    keys = select.float_keys(jnp.array(values, jnp.float32).reshape(BLOCKS, SIZE))
    _, count, listed = run(keys, 0, budget, 0, False, True)
    assert oracle.entries(listed, count) == sorted(ranked)


def test_nan_ranks_lowest():
    keys = select.float_keys(jnp.array([jnp.nan, -3e38, -jnp.nan, 0.0]))
    assert (np.asarray(keys)[[0, 2]] < np.asarray(keys)[[1, 3]]).all()
