"""The full command, with a tiny model trained for recall (`train_recall_model.py`)."""

import json
from pathlib import Path

import pytest

from mtraining_jax.cli.evaluate import main
from mtraining_jax.evaluation.load import Loaded
from mtraining_jax.evaluation.results import read_lines

MODEL = Path(__file__).parents[1] / "checkpoints" / "recall_tiny"
TASK = "--tasks mqar --task.pairs=4 --task.vocab_size=64 --parallel.devices_per_node=1"


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs the command; returns its exit status and output."""
    for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"):
        monkeypatch.setenv(name, "1")  # the command sets these; monkeypatch restores them
    # A window of 32 tokens: one vertical, and the slashes up to there.
    budgets = [{str(head): ["vertical_and_slash", 1, 32, 1] for head in range(2)}] * 2
    (tmp_path / "window.json").write_text(json.dumps(budgets))
    window = (
        f"--sparsity.kind=fixed --sparsity.budget_file={tmp_path / 'window.json'} "
        "--sparsity.block_size=16 --sparsity.num_probe_queries=16 --sparsity.sliding_window=32 "
        "--sparsity.sink_tokens=0"
    )

    def run(arguments):
        words = f"--model {MODEL} --output {tmp_path / 'out'} {TASK} {window} {arguments}"
        status = main(words.split())
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


def test_dense_finds_what_a_window_does_not(command, tmp_path, monkeypatch):
    monkeypatch.setattr(Loaded, "note_on_dense_use", lambda self: "note: trained sparse")
    status, printed = command("--lengths 128 --samples 6 --attention both --sparse-answers")
    assert status == 0
    lines = list(read_lines(tmp_path / "out"))
    scores = {
        attention: [line["score"] for line in lines if line["attention"] == attention]
        for attention in ("dense", "sparse")
    }
    assert min(scores["dense"]) == 1 and len(scores["dense"]) == 6
    assert sum(scores["sparse"]) <= 2  # only pairs that are near their question
    assert all((line["density"] == 1) == (line["attention"] == "dense") for line in lines)
    assert (
        "| mqar | recall_tiny | dense | 100.0 (6) |"
        in (tmp_path / "out" / "results.md").read_text()
    )
    assert (tmp_path / "out" / "scores.png").stat().st_size > 8000
    assert "sparse - dense" in printed and "note: " not in printed

    # Everything is evaluated: nothing runs again, and another seed is refused.
    content = (tmp_path / "out" / "samples.jsonl").read_text()
    assert (
        "12 of 12 samples are already evaluated"
        in command("--lengths 128 --samples 6 --attention both --sparse-answers")[1]
    )
    status, printed = command("--lengths 128 --seed 3 --sparse-answers")
    assert status == 2 and "has results with seed = 0, but this evaluation has 3" in printed
    assert (tmp_path / "out" / "samples.jsonl").read_text() == content
    # There is a note only for dense use alone.
    other = f"--lengths 128 --samples 1 --output {tmp_path / 'other'}"
    assert "note: trained sparse" in command(other)[1]


def test_what_does_not_fit_the_model_is_refused_and_nothing_is_written(command, tmp_path):
    status, printed = command("--lengths 128,300")
    assert status == 2
    assert printed == (
        "error: length 300 is more than the 256 positions of recall_tiny "
        "(max_position_embeddings)\n"
    )
    status, printed = command("--lengths 128 --tasks needle")
    assert status == 2 and 'error: unknown option "pairs" of the tasks needle' in printed
    status, printed = command("--lengths 128 --tasks mqar,needle")
    assert status == 2 and 'task "needle" uses text, but recall_tiny has no tokenizer' in printed
    status, printed = command(f"--lengths 128 --second-model {tmp_path}")
    assert status == 2 and printed.startswith(f"error: {tmp_path} contains no model")
    assert not (tmp_path / "out").exists()
