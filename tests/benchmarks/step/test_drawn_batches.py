"""Drawn batches and lists: their densities, their orders, and the predicted times by hand."""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.step import drawn_batches, replicas
from benchmarks.step.drawn_batches import ORDERS, WARM, Pack, draw_batches, ordered
from benchmarks.step.drawn_lists import DrawnLists, densities_by_length
from benchmarks.step.replicas import found_of
from mtraining_jax.data.balance import imbalance
from mtraining_jax.documents import Documents
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.tools.plan.kernel_times import documents_ms
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
    steps = {how: found_of(run, *ordered([packs], how, run), None) for how in ORDERS}
    plain = steps.pop("none")
    assert 1e3 * plain.predicted_s == pytest.approx(ms[2] + ms[3] + run.rest_ms)
    assert plain.attention_imbalance == pytest.approx(imbalance(ms, 2))
    assert plain.density == pytest.approx(0.1)
    for step in steps.values():  # the longest and the shortest together
        wanted = imbalance([ms[3], ms[0], ms[2], ms[1]], 2)
        assert step.attention_imbalance == pytest.approx(wanted)
        assert 1e3 * step.predicted_s == pytest.approx(ms[3] + ms[0] + run.rest_ms)


def test_all_orders_have_the_packs_of_the_same_batches():
    run = a_run()
    warm, batches = draw_batches(run, 0, 3, 1.3, (150, 900))
    assert len(warm) == WARM and len(batches) == 3
    found = {how: list(ordered([*warm, *batches], how, run))[WARM:] for how in ORDERS}
    for how, steps in found.items():
        for step, batch in zip(steps, batches, strict=True):
            assert sorted(map(id, step)) == sorted(map(id, batch))
            if how == "none":
                assert step == batch
    starts, ends = (
        [found_of(run, step, None).attention_imbalance for step in found[how]]
        for how in ("none", "length")
    )
    assert starts == pytest.approx([1.3] * 3, abs=0.05)
    assert np.mean(ends) < np.mean(starts) - 0.05
    assert len(draw_batches(run, 0, 300, 0, (150, 900))[1]) == 300
    with pytest.raises(UserError, match=r"--batches=3: 0 of 400 drawn batches have .* 1\.99"):
        draw_batches(run, 0, 3, 1.99, (150, 900))


def drawn(lengths: list[int]) -> tuple[np.ndarray, float]:
    """The mask bool [Hq, NB, NB] that is drawn, and computed pairs over those wanted."""
    seq_len, block = 8192, 128
    pattern = DrawnLists(min_sparse_tokens=1024)
    documents = Documents.from_lengths([lengths], seq_len, block)
    blocks = jnp.arange(seq_len // block, dtype=jnp.int32)
    context = SelectionContext(blocks, seq_len // block, documents=documents)
    q = jnp.zeros((1, seq_len, 4, 8))
    index = jax.jit(lambda q: pattern.select(q, q, context).index)(q)
    computed = float(index.computed_pairs(seq_len).mean())
    table = densities_by_length(0, seq_len, 1024)
    padded = -(-np.array(lengths) // block) * block
    density = np.where(padded < 1024, 1, table[lengths])
    mask = index.computes(jnp.arange(0, seq_len, block), blocks)[0, ..., 0]
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
