import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.attention.sharded import select_index
from mtraining_jax.documents import Documents
from mtraining_jax.patterns.budgets import FixedBudget
from mtraining_jax.patterns.vertical_slash import VerticalSlash
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.scores import estimate
from mtraining_jax.selection.segments import sparse_segments
from pallas_kernels import names
from tests.patterns import inputs, oracle


@functools.partial(jax.jit, static_argnames=("pattern", "scale"))
def select(q, k, pattern, scale=None):
    num_blocks = q.shape[1] // pattern.block_size
    return select_index(
        q, k, pattern, block_ids=jnp.arange(num_blocks), num_blocks=num_blocks, scale=scale
    )


@functools.partial(jax.jit, static_argnames="pattern")
def choose_and_score(q, k, pattern):
    """The index, and scores [B, Hq, S] of columns by token and of diagonals by distance."""
    both = scores(estimate.softmax_scores, q, k, pattern.num_probe_queries, pattern.block_size)
    return select(q, k, pattern), both


def scores(estimate_scores, q, k, num_probe_queries=16, block_size=16):
    num_blocks = q.shape[1] // block_size
    context = SelectionContext(jnp.arange(num_blocks), num_blocks)
    last = q[:, None, -num_probe_queries:].swapaxes(2, 3)
    vertical, *diagonals = estimate_scores(last, k, context)
    both = vertical, estimate.join_diagonals(*diagonals)
    vertical, slash = (x.reshape(*x.shape[:2], -1) for x in both)
    return vertical, jnp.flip(slash, -1)


def listed(index, batch, head):
    """(block diagonals, columns) of one head."""
    at = (batch, head)
    return (
        oracle.entries(index.slash_blocks[at], index.slash_count[at]),
        oracle.entries(index.vertical_tokens[at], index.vertical_count[at]),
    )


SMALL = dict(block_size=16, num_probe_queries=16)


def test_columns_of_packed_documents_are_limited_by_their_share_of_the_pack():
    """Otherwise all documents together would have more than a list has room for."""
    pattern = VerticalSlash(0.9, 64, 8, "paper", **SMALL)
    documents = Documents.from_lengths([[16, 32, 80, 128], [256]], 256, 16)
    context = SelectionContext(jnp.arange(16), 16, documents=documents)
    limits = np.asarray(pattern.most_columns(sparse_segments(context, 4, 16)))
    assert limits[0].tolist() == [8, 16, 40, 64]  # of 2 * 64, and of 64 alone
    assert limits[1, 0] == 64 and limits.sum(1).max() <= pattern.document_columns(16)


CASES = {
    # (batch, seq_len, q heads, kv heads, head_dim), pattern
    "safe": (
        (2, 512, 4, 2, 32),
        VerticalSlash(top_p=0.7, **SMALL, sink_tokens=4, min_verticals=8, min_slashes=5),
    ),
    "safe with caps": (
        (1, 512, 2, 1, 16),
        VerticalSlash(0.95, 48, 10, **SMALL, min_verticals=40, min_slashes=9, local_blocks=3),
    ),
    "safe, p = 1": ((1, 256, 1, 1, 16), VerticalSlash(1.0, **SMALL)),
    "paper": (
        (2, 512, 6, 2, 32),
        VerticalSlash(top_p=0.6, preset="paper", block_size=32, num_probe_queries=20),
    ),
    "paper with caps": (
        (1, 512, 3, 3, 16),
        VerticalSlash(0.9, 40, 12, "paper", block_size=64, num_probe_queries=48),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_matches_brute_force(case):
    shape, pattern = CASES[case]
    safe = pattern.preset == "safe"
    seq_len, size = shape[1], pattern.block_size
    for seed in range(2):
        q, k = inputs.random(seed, *shape)
        index, (vertical, slash) = jax.device_get(choose_and_score(q, k, pattern))
        for at in np.ndindex(shape[0], shape[2]):
            rule = functools.partial(oracle.top_p, target=pattern.top_p * 2**30, keep_crossing=safe)
            verticals = rule(
                vertical[at],
                minimum=max(pattern.min_verticals, pattern.sink_tokens) if safe else 1,
                maximum=min(pattern.max_verticals, seq_len),
                forced=range(pattern.sink_tokens) if safe else (),
            )
            most_slashes = min(pattern.max_slashes, seq_len)
            slashes = rule(
                slash[at], minimum=pattern.min_slashes if safe else 0, maximum=most_slashes
            )
            diagonals = oracle.block_diagonals(slashes, size, seq_len // size)
            if safe:
                diagonals |= set(range(pattern.local_blocks))
            elif len(slashes) < most_slashes:
                diagonals |= {0}
            assert listed(index, *at) == (sorted(diagonals), sorted(verticals))


def test_capacities_are_static_and_bounded():
    q, k = inputs.random(0, 1, 512, 2, 1, 16)
    pattern = CASES["safe with caps"][1]
    index = select(q, k, pattern)
    assert index.vertical_tokens.shape == (1, 2, 128)  # 48 rounded up
    assert index.slash_blocks.shape == (1, 2, 2 * 10 + 3)
    index = select(q, k, dataclasses.replace(pattern, max_verticals=4096, max_slashes=4096))
    assert index.vertical_tokens.shape == (1, 2, 512)
    assert index.slash_blocks.shape == (1, 2, 32)
    assert index.block_size == 16
    assert all(leaf.dtype == jnp.int32 for leaf in jax.tree.leaves(index))


def test_one_sink_with_nearly_all_mass():
    seq_len, num_probe_queries = 1024, 32
    common = dict(block_size=32, num_probe_queries=num_probe_queries, max_slashes=128)
    q, k = inputs.one_sink(seq_len, token=5)
    context = SelectionContext(jnp.arange(seq_len // 32), seq_len // 32)
    paper = VerticalSlash(preset="paper", **common)
    selected = jax.jit(lambda q, k: paper.select(q, k, context))
    index, statistics = selected(q, k)
    # The sink alone crosses p. The reference drops it, and the diagonals through it (distances
    # S-37 .. S-6, minus one) serve only the last rows; here it is kept and counted.
    diagonals, verticals = listed(index, 0, 0)
    assert verticals == [5]
    assert diagonals == [0, 30, 31]
    ordinary, _ = inputs.random(0, 1, seq_len, 1, 1, 16)
    assert statistics["saved_heads"].tolist() == [[1]]
    assert selected(ordinary, ordinary).statistics["saved_heads"].tolist() == [[0]]
    safe = VerticalSlash(sink_tokens=2, min_verticals=2, min_slashes=0, **common)
    diagonals, verticals = listed(select(q, k, safe), 0, 0)
    assert verticals == [0, 1, 5]
    assert diagonals == [0, 1, 30, 31]
    # The first of more sinks than min_verticals crosses p; the others are kept, too.
    sinks = dataclasses.replace(safe, sink_tokens=4)
    assert listed(select(*inputs.one_sink(seq_len), sinks), 0, 0)[1] == [0, 1, 2, 3]


def test_a_full_list_of_the_paper_preset_forces_nothing():
    # Queries see what is about 320 tokens back, and little else.
    seq_len = 512
    angle = 2 * np.pi * np.arange(seq_len) / seq_len
    q = np.stack([np.cos(angle), np.sin(angle)], -1)[None, :, None] * 55
    k = np.roll(q, -320, axis=1)
    pattern = VerticalSlash(0.9, 16, 3, "paper", **SMALL)
    diagonals, _ = listed(select(jnp.float32(q), jnp.float32(k), pattern), 0, 0)
    assert diagonals == [19, 20, 21]
    safe = VerticalSlash(0.9, 16, 3, "safe", **SMALL, sink_tokens=1, min_verticals=1, min_slashes=1)
    diagonals, _ = listed(select(jnp.float32(q), jnp.float32(k), safe), 0, 0)
    assert diagonals == [0, 1, 19, 20, 21]


def test_equal_columns_are_kept_in_order():
    q = k = jnp.zeros((1, 256, 1, 16))
    pattern = VerticalSlash(0.5, 40, 20, **SMALL, min_verticals=30)
    _, verticals = listed(select(q, k, pattern), 0, 0)
    assert verticals == list(range(40))


def budget(verticals, slashes, **settings):
    arrays = (jnp.array(x, jnp.int32) for x in (verticals, slashes))
    settings = dict(max_verticals=96, max_slashes=80, sink_tokens=5, sliding_window=9) | settings
    return FixedBudget(*arrays, **SMALL, **settings)


def test_fixed_budgets_keep_the_largest_logit_sums():
    layers = budget([[0, 3, 20, 96], [7, 500, 64, 1]], [[0, 5, 80, 30], [12, 1, 9, 600]])
    q, k = inputs.random(3, 2, 512, 4, 2, 32)

    @jax.jit
    def choose_each(layers):
        def step(_, layer):
            where = dict(block_ids=jnp.arange(32), num_blocks=32)
            return None, select_index(q, k, layer, **where)

        return jax.lax.scan(step, None, layers)[1]

    indices = choose_each(layers)
    vertical, slash = map(np.asarray, scores(estimate.logit_scores, q, k))
    for layer in range(2):
        index = jax.tree.map(lambda leaf, i=layer: leaf[i], indices)
        for at in np.ndindex(2, 4):
            num_verticals = min(int(layers.verticals[layer, at[1]]), 96)
            num_slashes = min(int(layers.slashes[layer, at[1]]), 80)
            ranked = [-np.inf] * 5 + (-vertical[at][5:]).tolist()
            verticals = np.argsort(ranked, kind="stable")[:num_verticals]
            ranked = [-np.inf] * 9 + (-slash[at][9:]).tolist()
            slashes = np.argsort(ranked, kind="stable")[:num_slashes]
            diagonals = oracle.block_diagonals(slashes.tolist(), 16, 32) | {0}
            assert listed(index, *at) == (sorted(diagonals), sorted(verticals.tolist()))


def test_the_index_has_no_gradient_and_can_be_saved_by_a_policy():
    pattern = VerticalSlash(0.7, 40, 20, **SMALL, min_verticals=30)
    q, k = inputs.random(0, 1, 256, 2, 1, 16)
    policy = jax.checkpoint_policies.save_only_these_names(names.INDEX)

    def loss(qk, wrap=lambda f: f):
        def layer(q, k):
            index = select(q, k, pattern)
            picked = k[0, index.vertical_tokens[0, 0, :30], 0, 0]
            return (picked * index.slash_count.sum()).sum() + jnp.sin(q).sum(), index

        return wrap(layer)(*qk)

    (grad_q, grad_k), index = jax.grad(loss, has_aux=True)((q, k))
    expected = np.zeros(k.shape, np.float32)
    tokens = index.vertical_tokens[0, 0, :30]
    expected[0, tokens, 0, 0] = index.slash_count.sum()
    np.testing.assert_array_equal(grad_k, expected)
    np.testing.assert_array_equal(grad_q, jnp.cos(q))

    def estimates(wrap):
        gradient = jax.grad(functools.partial(loss, wrap=wrap), has_aux=True)
        return str(jax.make_jaxpr(gradient)((q, k))).count(" exp ")

    recomputed = estimates(jax.checkpoint)
    saved = estimates(functools.partial(jax.checkpoint, policy=policy))
    assert recomputed == 2 * saved


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(top_p=0.0), "top_p=0.0 must be a finite number .greater than 0 and at most 1"),
        (dict(top_p="0.9"), "top_p='0.9' must be a finite number"),
        (dict(num_probe_queries=4.0), "num_probe_queries=4.0 must be an integer"),
        (dict(preset="fast"), 'preset=.fast. must be "safe" or "paper"'),
        (dict(num_probe_queries=129), "num_probe_queries=129 must not exceed block_size=128"),
        (dict(num_probe_queries=0), "num_probe_queries=0 must be an integer .at least 1"),
        (dict(max_verticals=20), "sink_tokens=30 must not exceed max_verticals=20"),
        (dict(min_slashes=9, max_slashes=8), "min_slashes=9 must not exceed max_slashes=8"),
        (dict(local_blocks=0), "local_blocks=0 must be an integer .at least 1"),
    ],
)
def test_invalid_settings_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        VerticalSlash(**settings)


def test_invalid_arguments_raise():
    q, k = jnp.zeros((1, 64, 4, 16)), jnp.zeros((1, 64, 2, 16))
    pattern = VerticalSlash(**SMALL)

    def call(q=q, k=k, pattern=pattern, num_blocks=4, **settings):
        ids = jnp.arange(4)
        select_index(q, k, pattern, block_ids=ids, num_blocks=num_blocks, **settings)

    for settings, message in [
        (dict(k=k[:, :32]), r"q \(1, 64, 4, 16\) and k \(1, 32, 2, 16\) must be"),
        (dict(k=k.astype(jnp.bfloat16)), "q is float32 but k is bfloat16"),
        (dict(q=q[:, :, :3]), "3 query heads are not a multiple of 2"),
        (
            dict(pattern=VerticalSlash(block_size=32, num_probe_queries=8)),
            "64 local tokens do not match",
        ),
        (dict(num_blocks=1 << 20), "num_blocks=1048576 of block_size=16 exceeds the limit"),
        (dict(pattern=budget([1, 2], [1, 2])), r"verticals has shape \(2,\), but there are 4"),
        (dict(scale=-1.0), "scale=-1.0 must be positive"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(**settings)
