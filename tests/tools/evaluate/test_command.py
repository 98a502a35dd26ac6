"""The full command, with a tiny model trained for recall (`train_recall_model.py`)."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mtraining_jax.cli.evaluate import main
from mtraining_jax.tools.evaluate.load import Loaded
from mtraining_jax.tools.evaluate.results import read_lines
from tests.data.test_sources import save_tokenizer

MODEL = Path(__file__).parents[2] / "checkpoints" / "recall_tiny"
TASK = "--tasks mqar --task.pairs=4 --task.vocab_size=64"


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

    def run(arguments, task=TASK):
        where = f"--model {MODEL} --output {tmp_path / 'out'} --parallel.devices_per_node=1"
        words = f"{where} {window} {task} {arguments}"
        status = main(words.split())
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


def test_dense_finds_what_a_window_does_not(command, tmp_path, monkeypatch):
    monkeypatch.setattr(Loaded, "note_on_dense_use", lambda self: "note: trained sparse")
    status, printed = command("--lengths 128 --samples 6 --attention both --answers one-pass")
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
    again = command("--lengths 128 --samples 6 --attention both --answers one-pass")[1]
    where = f"{tmp_path / 'out'}, last evaluated 20"
    assert f"12 of 12 samples are already evaluated for this model: {where}" in again
    status, printed = command("--lengths 128 --seed 3 --answers one-pass")
    assert status == 2 and "has results with seed = 0, but this evaluation has 3" in printed
    assert (tmp_path / "out" / "samples.jsonl").read_text() == content
    # There is a note only for dense use alone.
    other = f"--lengths 128 --samples 1 --output {tmp_path / 'other'}"
    assert "note: trained sparse" in command(other)[1]


def test_adapters_are_evaluated_with_the_model_that_they_name(command, tmp_path):
    folder, base = tmp_path / "adapter", "--model.init_from " + str(MODEL)
    folder.mkdir()
    for name, start in (("one", 1.0), ("zero", 0.0)):  # of B
        shapes = {"A": (2, 64), "B": (64, 2)}
        tensors = {
            f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{factor}.weight": np.full(
                shape, start if factor == "B" else 1.0, np.float32
            )
            for layer in range(2)
            for factor, shape in shapes.items()
        }
        save_file(tensors, folder / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        arguments = f"--model {folder} --lengths 128 --samples 2 --output {tmp_path / name}"
        status, printed = command(arguments)
        assert status == 2 and "give its folder with --model.init_from=FOLDER" in printed
        status, printed = command(f"{arguments} {base}")
        assert status == 0, printed
        scores = [line["score"] for line in read_lines(tmp_path / name)]
        assert scores == [1, 1] if name == "zero" else max(scores) < 1
    # A run may have changed the context length; otherwise it is that of the base.
    for positions in (256, 64):
        status, printed = command(f"--model {folder} --lengths 8K {base}")
        assert status == 2 and f"more than the {positions} positions of adapter" in printed
        changed = json.loads((MODEL / "config.json").read_text())
        changed["max_position_embeddings"] = 64
        (folder / "model_config.json").write_text(json.dumps(changed))


def test_a_longer_context_is_measured_if_the_model_is_changed(command):
    longer = "--lengths 300 --samples 1 --model.max_position_embeddings"
    status, printed = command(f'{longer}=512 --model.override=["max_position_embeddings"]')
    assert status == 0, printed
    status, printed = command(f"{longer}=299")
    assert status == 2 and "300 is more than the 299 positions" in printed


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


def test_stored_scores_are_only_for_the_same_model_and_files(command, tmp_path):
    """Everything that is replaced keeps its name and its size."""
    model, text = tmp_path / "model", tmp_path / "text.txt"
    tokenizer = save_tokenizer(tmp_path / "tokenizer.json", [(0, "?"), (1, "a"), (2, "</s>")])
    text.write_text("a b " * 64 + "the end")
    shutil.copytree(MODEL, model)
    arguments = (
        f"--model {model} --tokenizer {tokenizer} --lengths 32 --samples 1 --attention both",
        f"--tasks documents --task.documents={text}",
    )
    status, printed = command(*arguments)
    assert status == 0 and "already evaluated" not in printed

    def replaced(path, old, new):
        content = path.read_bytes()
        assert content.count(old) == 1
        path.write_bytes(content.replace(old, new))
        refused, printed = command(*arguments)
        path.write_bytes(content)
        assert refused == 2 and printed.endswith("; use another --output, or the earlier value\n")
        return printed

    weights = (model / "model.safetensors").read_bytes()[-40:]
    changed = bytes([weights[0] ^ 1]) + weights[1:]  # the last bit of one value in bfloat16
    result = f"error: {tmp_path / 'out'} has results with models.model.digest"
    assert f"{result}.parameters = " in replaced(model / "model.safetensors", weights, changed)
    eps = b'"rms_norm_eps": 1e-06', b'"rms_norm_eps": 1e-05'
    assert f"{result}.configuration = " in replaced(model / "config.json", *eps)
    assert f"{result}.tokenizer = " in replaced(Path(tokenizer), b'"a": 1', b'"b": 1')
    budget = b"32, 1]}]", b"31, 1]}]"
    assert f"{result}.sparsity = " in replaced(tmp_path / "window.json", *budget)
    printed = replaced(text, b"end", b"END")  # after the tokens of the prompt
    assert "tasks.documents.digest of code and files = " in printed

    assert "2 of 2 samples are already evaluated for this model" in command(*arguments)[1]
    # Of an earlier version, without digests.
    settings = tmp_path / "out" / "settings.json"
    known = json.loads(settings.read_text())
    known["models"]["model"] = {"name": "model", "step": 4}
    settings.write_text(json.dumps(known))
    status, printed = command(*arguments)
    assert status == 2 and printed.endswith(
        f"error: {tmp_path / 'out'} has results of model without a digest of its parameters, so "
        "they may be of another model of this name; use another --output\n"
    )
