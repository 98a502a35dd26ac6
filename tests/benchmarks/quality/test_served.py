"""Answers through the engine: dense, with a sparse prompt, and sparse."""

import json
import os

import numpy as np
import pytest

from benchmarks.quality import served
from benchmarks.quality.far_copies import far_copies
from mtraining_jax.tools.evaluate.engine.engine import Engine
from mtraining_jax.tools.evaluate.model import Forced
from mtraining_jax.utils.errors import UserError
from tests.models.common import CHECKPOINTS

FOLDER = CHECKPOINTS / "llama3_tiny"
SPARSE = {
    "sparsity.tau": "0.3", "sparsity.min_sparse_tokens": "0", "sparsity.sink_blocks": "0",
    "sparsity.local_blocks": "1", "parallel.devices_per_node": "1",
}  # fmt: skip


def test_the_table_has_the_losses_of_the_engine_and_a_second_call_adds_nothing(tmp_path, capsys):
    texts = np.random.default_rng(0).integers(0, 256, (2, 400)).astype(np.uint16)
    texts[:, 390:] = texts[:, 10:20]  # far copies
    np.save(tmp_path / "texts.npy", texts)
    overrides = [f"{name}={value}" for name, value in SPARSE.items()]
    command = [
        f"--model=tiny={FOLDER}", f"--texts={tmp_path}/texts.npy", "--seq-len=400", "--answer=12",
        "--new-tokens=4", "--batches=2", f"--results={tmp_path}/rows.jsonl",
        f"--out={tmp_path}/page.md",
        "--override", *overrides,
    ]  # fmt: skip
    served.main(command)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * 3
    found = {(row["arm"], row["text"]): row for row in rows if "text" in row}
    tokens = texts[1].astype(np.int32)
    engine = Engine.load(FOLDER, attention="sparse", overrides=SPARSE)
    log_probs = engine.forced(tokens[:-12], tokens[-12:]).log_probs
    assert found["sparse", 1]["loss"] == pytest.approx(-log_probs.mean(), abs=1e-5)
    copies = far_copies(tokens)[-12:]
    assert found["sparse", 1]["copies"] == copies.sum() == 7
    assert found["sparse", 1]["copies_loss"] == pytest.approx(-log_probs[copies].sum(), abs=1e-4)
    losses = [[found[arm, text]["loss"] for text in range(2)] for arm in served.ARMS]
    assert all(abs(a - b) > 1e-4 for a, b in zip(losses[1], losses[2], strict=True))
    assert found["dense", 0]["density"] == 1 > found["dense answers", 0]["density"]
    page = (tmp_path / "page.md").read_text()
    difference = np.subtract(losses[2], losses[1])
    error = np.std(difference, ddof=1) / 2**0.5
    assert f"{difference.mean():+.4f} ± {error:.4f}" in page
    speeds = {row["arm"]: row["tokens_per_second"] for row in rows if "text" not in row}
    assert set(speeds) == set(served.ARMS) and min(speeds.values()) > 0
    served.main(command)
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 9
    capsys.readouterr()


class Counting:
    """An engine; its losses are 1, 2, 3, ... by the number of calls."""

    def __init__(self):
        self.calls = 0

    def forced(self, prompt, answer):
        assert len(prompt) + len(answer) == 256
        self.calls += 1
        return Forced(-np.full(len(answer), self.calls, np.float32), answer > 0, 1.0)


def test_rows_of_other_texts_models_and_numbers_of_tokens_are_not_used(
    tmp_path, monkeypatch, capsys
):
    engine = Counting()
    monkeypatch.setattr(served, "engines", lambda *_: iter([("dense", engine)]))
    texts = np.arange(600).reshape(2, 300)
    np.save(tmp_path / "texts.npy", texts)
    where = [f"--texts={tmp_path}/texts.npy", f"--results={tmp_path}/rows.jsonl", "--answer=4"]

    def table(*changes, model=f"tiny={FOLDER}"):
        served.main([f"--model={model}", "--seq-len=256", *where, "--batches", *changes])
        lines = capsys.readouterr().out.splitlines()
        cells = [line.strip("| ").split(" | ") for line in lines if " | dense | " in line]
        return {model: loss for model, _, loss, *_ in cells}

    assert table() == {"tiny": "1.5000"}
    np.save(tmp_path / "texts.npy", texts.astype(np.uint16))  # the same texts
    assert table(model=f"tiny={os.path.relpath(FOLDER)}") == {"tiny": "1.5000"}
    assert table("--new-tokens=9") == {"tiny": "3.5000"}
    assert table("--answer=5") == {"tiny": "5.5000"}
    assert table("--override", "model.dtype=float32") == {"tiny": "7.5000"}
    assert table(model=f"other={FOLDER}") == {"tiny": "1.5000", "other": "9.5000"}
    assert table(model=f"tiny={tmp_path}") == {"other": "9.5000", "tiny": "11.5000"}
    np.save(tmp_path / "texts.npy", texts + 1)
    assert table() == {"tiny": "13.5000"} and engine.calls == 14
    for wrong, message in (
        (["--seq-len=301"], "--seq-len=301, but texts have 300 tokens"),
        (["1", "3"], "--batches=3, but there are 2 texts"),
    ):
        with pytest.raises(UserError, match=message):
            table(*wrong)


def test_a_pattern_whose_new_tokens_do_not_select_is_refused():
    with pytest.raises(UserError, match='answers = "sparse" does not fit sparsity.kind = "verti'):
        next(served.engines(str(FOLDER), {"sparsity.kind": "vertical_slash"}))
