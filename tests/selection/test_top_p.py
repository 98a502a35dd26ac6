import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mtraining_jax.selection.rules import top_p
from mtraining_jax.selection.segments import PackedSegments
from tests.patterns import oracle

BLOCKS, SIZE = 6, 8
TOKENS = BLOCKS * SIZE
FORCED = 1 << 30
MASS = FORCED - 1
FILL = 1000


@functools.partial(jax.jit, static_argnames=("with_mass", "keep_crossing"))
def run(keys, minimum, maximum, target, with_mass, keep_crossing):
    rule = top_p.Rule(
        minimum=minimum,
        maximum=maximum,
        mass_target=target if with_mass else None,
        mass_mask=MASS,
        keep_crossing=keep_crossing,
    )
    kept, count = top_p.kept_entries(keys, rule)
    return kept, count[..., 0], top_p.ascending_entries(kept, TOKENS, FILL)


@settings(max_examples=150, deadline=None)
@given(
    # Few distinct scores create many ties; the last range gives keys above bit 30 and zeros.
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
def test_matches_adding_entries_one_by_one(
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
    keys = top_p.float_keys(jnp.array(values, jnp.float32).reshape(BLOCKS, SIZE))
    _, count, listed = run(keys, 0, budget, 0, False, True)
    assert oracle.entries(listed, count) == sorted(ranked)


def test_nan_ranks_lowest():
    keys = top_p.float_keys(jnp.array([jnp.nan, -3e38, -jnp.nan, 0.0]))
    assert (np.asarray(keys)[[0, 2]] < np.asarray(keys)[[1, 3]]).all()


# For each of two rows: the sequence of each block (2: none), where sequences begin, their lengths;
# the second row has only one.
PACKED = [
    [[2, 0, 0, 1, 1, 1], [0, 0, 0, 0, 2, 2]], [[1, 3], [0, BLOCKS]], [[2, 3], [4, 0]]
]  # fmt: skip


@functools.partial(jax.jit, static_argnames=("with_mass", "keep_crossing"))
def run_packed(keys, minimum, maximum, target, with_mass, keep_crossing):
    places = (np.array(x, np.int32) for x in PACKED)
    segments = PackedSegments(*places, tokens=np.zeros((2, 2), np.int32))
    masses = (target, MASS) if with_mass else ()
    rule = top_p.Rule(minimum, maximum, *masses, keep_crossing=keep_crossing)
    return top_p.kept_entries(keys, rule, segments)


def test_sequences_of_a_row_select_independently():
    rng = np.random.default_rng(0)
    for case in range(60):
        most = (2, 9, 2**22)[case % 3]
        scores = rng.integers(0, most, (2, BLOCKS, SIZE))
        limits = np.sort(rng.integers(0, 2 * SIZE + 1, (2, 2, 2)), axis=0).astype(np.int32)
        limits[:, 1, 1] = 0
        target, crossing = int(rng.integers(1, 12 * most)), bool(case % 2)
        keys = scores.astype(np.uint32)
        kept, count = jax.device_get(run_packed(keys, *limits, target, True, crossing))
        plain, _ = jax.device_get(run_packed(keys, *limits, target, False, True))
        for row, (_, first, length) in enumerate(zip(*PACKED, strict=True)):
            for n, (start, blocks) in enumerate(zip(first, length, strict=True)):
                own, (least, top) = slice(start, start + blocks), limits[:, row, n]
                alone = scores[row, own].reshape(-1)
                wanted = oracle.top_p(
                    alone, target, minimum=least, maximum=top, keep_crossing=crossing
                )
                assert set(np.flatnonzero(kept[row, own])) == wanted
                assert count[row, n] == len(wanted)
                largest = set(oracle.descending(alone)[:top])
                assert set(np.flatnonzero(plain[row, own])) == largest
