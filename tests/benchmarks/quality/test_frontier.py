"""Far copies, how settings are written, and one run of the frontier benchmark on a tiny model."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.quality import frontier, frontier_report
from benchmarks.quality.far_copies import far_copies
from benchmarks.quality.measure import summary
from benchmarks.quality.stepped_model import SteppedModel, read_model
from mtraining_jax.models.label_scores import label_scores
from pallas_kernels import DenseIndex, attention

TINY = Path(__file__).parents[2] / "checkpoints" / "llama3_tiny"


def test_a_far_copy_ends_a_gram_whose_latest_place_is_far():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 7, 600)  # few enough that grams come again by chance
    expected = []
    for i in range(600):
        gram = tokens[max(i - 2, 0) : i + 1].tolist()
        places = [j for j in range(2, i) if tokens[j - 2 : j + 1].tolist() == gram]
        expected.append(i >= 2 and bool(places) and i - places[-1] > 100)
    found = far_copies(tokens, gram=3, near=100)
    assert found.tolist() == expected and 0.05 < found.mean() < 0.95
    assert not far_copies(tokens[:2], gram=3).any()


def test_a_summary_tells_copies_kinds_and_the_worst_head():
    texts = np.arange(1200).reshape(2, 600)
    texts[0, 500:510] = texts[0, 100:110]  # six far copies that end a gram of five, seven of four
    dense = np.ones((2, 599), np.float32)
    losses = dense.copy()
    losses[0, 502:509] += 2.0  # on tokens 503 to 509
    recall = np.full((2, 3, 4), 0.9, np.float32)
    recall[:, 1, 2] = 0.5, 0.7
    shares = np.full((2, 3, 1), 0.25, np.float32)
    found = summary(
        {
            "losses": losses, "density": shares, "executed": 2 * shares, "recall": recall,
        },
        dense, texts, ["C", "prose"],
    )  # fmt: skip
    assert found["rise_copies"] == pytest.approx(2.0)
    assert found["rise"] == pytest.approx(14 / 1198)
    assert found["rise_kinds"] == {"C": pytest.approx(14 / 599), "prose": 0.0}
    assert found["rise_error"] == pytest.approx(7 / 599)
    assert (found["density"], found["executed"], found["keys"]) == (0.25, 0.5, 0.25 * 601 / 2)
    assert found["recall_worst"] == pytest.approx(0.6)


def test_a_model_in_steps_is_the_same_model():
    model = read_model(TINY, 128, "float32")
    tokens = np.random.default_rng(0).integers(0, 288, 128)

    def attend(q, k, v):
        return attention(q, k, v, DenseIndex(128))

    hidden, _ = jax.jit(lambda x: model(x, jnp.arange(128), lambda *qkv: (attend(*qkv), {})))(
        jnp.asarray(tokens)[None]
    )
    whole = label_scores(
        hidden[:, :-1], model.lm_head_weight(), jnp.asarray(tokens)[None, 1:], chunk_size=128
    )
    attend = jax.jit(attend)
    stepped = SteppedModel(model, 128)
    found = stepped.losses(tokens, lambda number, *qkv: attend(*qkv))
    np.testing.assert_allclose(found, whole.loss[0], rtol=1e-5)
    stretched = read_model(TINY, 1024, "float32").spec
    assert (stretched.rope_scaling.type, stretched.rope_scaling.factor) == ("yarn", 2.0)


def test_a_run_writes_each_setting_as_soon_as_it_is_measured(tmp_path, capsys):
    texts = tmp_path / "texts"
    texts.mkdir()
    tokens = np.random.default_rng(1).integers(0, 288, (4, 512))
    np.save(texts / "tokens.npy", tokens.astype(np.int32))
    kinds = [{"kind": kind} for kind in ("C", "C", "prose", "prose")]
    (texts / "sources.json").write_text(json.dumps(kinds))
    out = tmp_path / "made" / "result"
    options = ["--model", str(TINY), "--texts", str(texts), "--out", str(out)]
    options += ["--seq-len=256", "--sequences=2", "--recall-rows=8", "--repeats=1", "--seed=3"]
    with pytest.raises(SystemExit, match="1 of 3 settings failed: .*:Broken"):
        frontier.main([
            *options, "--patterns", "window,blocks=1", "moba,chunk_size=128,top_k=2",
            "tests.benchmarks.quality.broken_pattern:Broken",
        ])  # fmt: skip
    lines = out.with_suffix(".jsonl").read_text().splitlines()
    run, near, whole, broken = map(json.loads, lines)
    assert run["run"]["timed_layers"] == [0, 1] and run["run"]["seed"] == 3
    # Two chunks of a sequence of two are all there is.
    assert whole["density"] == pytest.approx(1) and abs(whole["rise"]) < 1e-5
    assert whole["recall"] == pytest.approx(1, abs=1e-5)
    assert whole["times"]["forward"] > 0 and whole["times"]["backward"] > 0
    assert near["density"] < 0.7 and abs(near["rise"]) > 1e-5 and set(near["rise_kinds"]) == {
        "C", "prose"
    }  # fmt: skip
    assert near["recall_worst"] < near["recall"] < 1
    assert all(near["times"][part] > 0 for part in frontier_report.PARTS)
    assert near["times"]["density"] == pytest.approx(near["density"])
    assert broken["failed"] == "there is nothing to choose"
    assert out.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    assert "window blocks=1 | 0." in out.with_suffix(".md").read_text()
    for wrong, reason in (
        (["--seq-len=250"], "250 is not a multiple of 128, the block_size of dense"),
        (["--sequences=5"], "--sequences 5 must be from 1 to 4"),
        (["--seq-len=1024"], "--seq-len 1024 is more than the 512 of the texts"),
        (["--texts", str(tmp_path)], "is not a folder of benchmarks.quality.texts"),
    ):
        with pytest.raises(SystemExit):
            frontier.main([*options, *wrong, "--patterns", "window"])
        assert reason in capsys.readouterr().err
