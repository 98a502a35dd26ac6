"""Selections with fewer products, on a tiny model and on drawn queries and keys."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.fewer_scores import Far, Leading, Pages, Rows, main
from mtraining_jax.selection.context import SelectionContext

TINY = Path(__file__).parents[2] / "checkpoints" / "llama3_tiny"
BLOCKS, DIM = 6, 16


def drawn():
    rng = np.random.default_rng(0)
    q, k = (
        jnp.asarray(rng.normal(size=(1, BLOCKS * 128, heads, DIM)) * 2, jnp.float32)
        for heads in (4, 2)
    )
    return q, k, SelectionContext(jnp.arange(BLOCKS, dtype=jnp.int32), BLOCKS)


def scores(pattern):
    q, k, context = drawn()
    return np.asarray(jax.jit(lambda q, k: pattern.scores(q, k, context))(q, k))


@pytest.mark.parametrize(
    "exact",
    [
        Pages(page=1, share=0.0),
        Leading(components=DIM, share=0.0),
        Leading(components=DIM, share=0.0, by_queries=0),
        Far(near=BLOCKS),
    ],
    ids=["pages", "leading", "principal", "far"],
)
def test_without_savings_scores_are_those_of_the_rows(exact):
    np.testing.assert_allclose(scores(exact), scores(Rows()), atol=2e-5)


def test_blocks_of_little_mass_are_omitted():
    masses, found = scores(Rows()), scores(Pages(page=1, share=1.0))
    light = masses < 1 / np.arange(1, BLOCKS + 1)[:, None]
    np.testing.assert_array_equal(found, np.where(light, 0, masses))
    assert 0.1 < light.mean() < 0.9
    pooled = scores(Pages(page=16, share=1.0))
    assert ((pooled == 0) | (pooled == masses)).all() and (pooled != found).any()


def test_far_blocks_are_scored_by_few_rows():
    masses, found = scores(Rows()), scores(Far(near=2, rows=4))
    rows, columns = np.indices(masses.shape[2:])
    same = rows - columns < 2
    np.testing.assert_array_equal(found[..., same], masses[..., same])
    few = scores(Rows(probe_queries_per_block=4))
    np.testing.assert_array_equal(found[..., ~same], few[..., ~same])


def test_losses_of_the_tries(tmp_path, monkeypatch):
    texts, out = tmp_path / "texts.npy", tmp_path / "out.jsonl"
    np.save(texts, np.random.default_rng(0).integers(0, 256, (1, 1024)))
    few = "tau=0.5,sink_blocks=0,local_blocks=1"
    tries = ["rows,tau=1.0", f"rows,{few}", f"layers,every=2,{few}", f"pages,share=1.0,{few}"]
    arguments = [f"--model={TINY}", f"--texts={texts}", "--seq-len=1024", "--dtype=float32"]
    monkeypatch.setattr("sys.argv", ["tries", *arguments, f"--out={out}", "--tries", *tries])
    main()
    found = {row["try"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert list(found) == ["dense", *tries]
    dense, every, rows, layers, pages = found.values()
    assert every["loss"] == pytest.approx(dense["loss"], abs=1e-5)
    assert len({x["loss"] for x in (rows, layers, pages)}) == 3
    assert rows["scored"] == 1 and layers["scored"] == 0.5
    main()  # nothing is left to do
    assert len(out.read_text().splitlines()) == 5
