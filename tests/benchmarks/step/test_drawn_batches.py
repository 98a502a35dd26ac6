"""Drawn batches and lists: their densities, their orders, and the predicted times by hand."""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.step import drawn_batches, drawn_lists, replicas
from benchmarks.step.drawn_batches import (
    BOUNDS,
    ORDERS,
    TUNED,
    WARM,
    Pack,
    assign,
    draw_batches,
    predicted,
)
from benchmarks.step.drawn_lists import DrawnLists, densities_by_length
from benchmarks.step.replicas import Found
from mtraining_jax.cost_model.kernel_times import documents_ms
from mtraining_jax.data.balance import imbalance
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.documents import Documents
from mtraining_jax.utils.errors import UserError

SIZES = (
    "--parallel.nodes=1", "--parallel.devices_per_node=1", "--data.seq_len=1024",
    "--sparsity.min_sparse_tokens=256", "--model.num_layers=1", "--model.remat=none",
)  # fmt: skip


@functools.cache
def a_run(config="tiny", fields=SIZES):
    """Two replicas of two packs."""
    args = argparse.Namespace(config=config, groups=2, parts=2, seed=0, predict=True)
    return replicas.configured(args, fields)[0]


def test_densities_are_those_of_the_anchors():
    table = densities_by_length(0, 2**19, 8192)
    for length, wanted in ((32768, 0.152), (520000, 0.063), (8000, 1.0), (8192, 0.236)):
        assert np.median(table[length : length + 1000]) == pytest.approx(wanted, rel=0.03) or (
            wanted == 1.0 and (table[length - 1000 : length] == 1.0).all()
        )
    lengths = drawn_batches.document_lengths(
        np.random.default_rng(0), 2**24, 2**19, drawn_batches.MEANS
    )
    assert lengths.max() <= 2**19 and lengths.sum() == pytest.approx(2**24, rel=0.2)


def test_a_step_takes_as_long_as_its_slowest_replica():
    run = a_run("qwen3b_512k", ("--data.seq_len=131072", "--parallel.devices_per_node=4"))
    packs = [Pack(np.array([n]), np.array([0.1])) for n in (10_000, 20_000, 30_000, 40_000)]
    ms = [documents_ms(pack.lengths, pack.densities, run.size).sum() for pack in packs]
    steps = {how: predicted(*found, run) for how, found in assign([], [packs], run).items()}
    steps = {how: Found.of(times) for how, times in steps.items()}
    plain = steps.pop("none")
    assert plain.step_ms == pytest.approx(ms[2] + ms[3] + run.rest_ms)
    assert plain.attention == pytest.approx(imbalance(ms, 2))
    assert plain.density == pytest.approx(0.1)
    for how in ("length", "density"):
        # The longest and the shortest together.
        assert steps[how].attention == pytest.approx(imbalance([ms[3], ms[0], ms[2], ms[1]], 2))
        assert steps[how].step_ms == pytest.approx(ms[3] + ms[0] + run.rest_ms)


def test_tuned_replicas_approach_each_other():
    run = a_run("qwen3b_512k", ("--data.seq_len=131072", "--parallel.devices_per_node=4"))
    rng = np.random.default_rng(0)
    packs = []
    for long in (131072 - 128, 100_000, 110_000, 90_000):
        density = 0.152 * (long / 32768) ** -0.318 * rng.lognormal(0, 0.25, 2)[0]
        packs.append(Pack(np.array([long, 128]), np.array([density, 1.0])))
    plain = imbalance([run.attention_ms([pack]) for pack in packs], 2)
    *_, last = drawn_batches._tuned([run.split(packs)] * 30, run)
    assert Found.of(predicted(last, run)).attention < 1.03 < plain < 1.4
    assert 0.85 <= last.shares.min() < 0.9 < last.shares.max() <= 0.97
    for packs in last.packs:
        assert all(pack.densities[1] == 1 for pack in packs)  # short documents do not respond


def test_all_orders_have_the_packs_of_the_same_batches():
    run = a_run()
    warm, batches = draw_batches(run, 0, 3, 1.3, (150, 900))
    assert len(warm) == WARM and len(batches) == 3
    found = assign(warm, batches, run)
    assert tuple(found) == ORDERS
    for how, steps in found.items():
        assert len(steps) == 3
        for step, batch in zip(steps, batches, strict=True):
            assert [len(packs) for packs in step.packs] == [run.packs] * run.replicas
            own = [id(pack.lengths) for packs in step.packs for pack in packs]
            assert sorted(own) == sorted(id(pack.lengths) for pack in batch)
            if how == "none":
                assert own == [id(pack.lengths) for pack in batch]
            assert (step.shares != BOUNDS.base).any() == (how == TUNED)
    starts = [Found.of(predicted(step, run)).attention for step in found["none"]]
    assert starts == pytest.approx([1.3] * 3, abs=0.05)
    ends = [Found.of(predicted(step, run)).attention for step in found["length"]]
    assert np.mean(ends) < np.mean(starts) - 0.05
    assert len(draw_batches(run, 0, 300, 0, (150, 900))[1]) == 300
    with pytest.raises(UserError, match=r"--batches=3: 0 of 400 drawn batches have .* 1\.99"):
        draw_batches(run, 0, 3, 1.99, (150, 900))


def drawn(lengths: list[int], share: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The mask bool [Hq, NB, NB] that is drawn, and computed pairs over those wanted."""
    seq_len, block = 8192, 128
    pattern = DrawnLists(min_sparse_tokens=1024)
    documents = Documents.from_lengths([lengths], seq_len, block).blocks()
    context = SelectionContext(
        jnp.arange(seq_len // block, dtype=jnp.int32),
        seq_len // block,
        documents=documents,
        shares=None if share is None else jnp.array([round(share * 2**15)], jnp.int32),
    )
    q = jnp.zeros((1, seq_len, 4, 8))
    index = jax.jit(lambda q: pattern.select(q, q, context).index)(q)
    computed = float(index.computed_pairs(seq_len).mean())
    table = densities_by_length(0, seq_len, 1024)
    padded = -(-np.array(lengths) // block) * block
    growth = 1.0
    if share is not None:
        growth = np.interp(share, drawn_lists.SHARES, drawn_lists.DENSITIES) / 0.152
    density = np.where(padded < 1024, 1, np.minimum(table[lengths] * growth, 1))
    first = jnp.arange(0, seq_len, block)
    mask = index.computes(first, jnp.arange(seq_len // block))[0, ..., 0]
    mask = np.asarray(mask) & np.tri(seq_len // block, dtype=bool)
    return mask, computed / (density @ (padded * (padded + 1) / 2))


def test_documents_compute_the_densities_that_are_drawn():
    for lengths in ([8192], [4000, 1000, 3000], [890, 5000]):
        mask, ratio = drawn(lengths)
        assert ratio == pytest.approx(1, abs=0.03)
    # Documents keep apart, short ones are dense, and what follows them is empty.
    assert np.array_equal(mask[:, :7, :7], np.tile(np.tri(7, dtype=bool), (4, 1, 1)))
    assert not mask[:, 7:, :7].any() and not mask[:, 47:].any()
    assert mask[:, 7:47, 7].all() and (mask[0] != mask[1]).any()


def test_a_larger_mass_fraction_computes_more_of_the_same_pairs():
    masks = {share: drawn([8192], share) for share in (0.85, 0.9, 0.95)}
    assert np.array_equal(masks[0.9][0], drawn([8192])[0])
    for _, ratio in masks.values():
        assert ratio == pytest.approx(1, abs=0.03)
    small, base, large = (mask for mask, _ in masks.values())
    assert (base | small == base).all() and (large | base == large).all()
    assert small.sum() < base.sum() < large.sum()
