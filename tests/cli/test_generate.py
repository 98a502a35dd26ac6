"""The command `generate.py`, and the function behind it."""

import io
import sys

import pytest

import mtraining_jax
from mtraining_jax.cli import generate
from mtraining_jax.evaluation.load import Loaded
from tests.models.common import CHECKPOINTS

FOLDER = str(CHECKPOINTS / "llama3_tiny")


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the command on one of the test devices; returns status, new text and messages."""
    monkeypatch.setattr(generate, "set_platform", lambda cpu_devices: None)

    def run(*arguments):
        status = generate.main(arguments)
        return status, *capsys.readouterr()

    return run


ON_ONE = ("--parallel.devices_per_node=1", "--sparsity.block_size=16")


def test_a_text_is_continued(command, monkeypatch):
    model = ("--model", FOLDER, "--tokenizer", "bytes", "--max-new-tokens=5", *ON_ONE)
    status, text, messages = command(*model, "--prompt", "Here we go. ")
    assert status == 0 and "5 new tokens" in messages and "density 1.000" in messages
    assert "note: " not in messages
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Here we go. ")))
    monkeypatch.setattr(Loaded, "note_on_dense_use", lambda self: "note: trained sparse")
    status, again, messages = command(*model, "--prompt-file", "-")
    assert (status, again) == (0, text) and "note: trained sparse" in messages

    engine = mtraining_jax.Engine.load(
        FOLDER, tokenizer="bytes", overrides=[x[2:].split("=") for x in ON_ONE]
    )
    options = mtraining_jax.GenerateOptions(max_new_tokens=5)
    found = mtraining_jax.generate(engine, "Here we go. ", options)
    assert found.text + "\n" == text and len(found.tokens) == 5


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--max-new-tokens=0", "max_new_tokens = 0 must be at least 1"),
        ("--temperature=-1", "temperature = -1.0 must be a finite number >= 0"),
        ("--seed=-1", "seed = -1 must be from 0 to"),
        ("--stop=", "stop contains an empty text"),
    ],
)
def test_numbers_are_checked_before_jax_starts(command, monkeypatch, argument, message):
    monkeypatch.setattr(generate, "set_platform", None)  # a call would be a TypeError
    status, _, messages = command("--model", FOLDER, "--prompt=a", argument)
    assert status == 2 and message in messages


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--model is missing"),
        (("--model", FOLDER), "give either --prompt or --prompt-file"),
        (("--model", FOLDER, "--prompt="), "the prompt is empty"),
        (("--model", FOLDER, "--prompt-file=no.txt"), "--prompt-file=no.txt cannot be read: No su"),
        (("--model", "/no/folder", "--prompt=a"), "/no/folder contains no model"),
        (("--model", FOLDER, "--prompt=a"), "has no tokenizer; set one with --tokenizer=PATH"),
        (("--model", FOLDER, "--prompt=a", "--top-p=0.9"), "--top-p=0.9 has no effect with --temp"),
        (
            ("--model", FOLDER, "--prompt=a", "--sparsity.tau=0.5"),
            "--sparsity.tau has no effect with --attention=dense",
        ),
        (("--model", FOLDER, "--prompt=a", "--temperature=1", "--top-p=2"), "top_p = 2.0 must be"),
        (("--model", FOLDER, "--prompt=a", "--best"), "unknown option --best"),
        (("--model", FOLDER, "--prompt=a", "--model.dtype"), "--model.dtype needs a value"),
        (("--model", FOLDER, "--prompt=a", "--seed=x"), "argument --seed: invalid int value"),
    ],
)
def test_mistakes_end_in_a_sentence(command, arguments, message):
    status, text, messages = command(*arguments)
    assert status == 2 and text == ""
    assert messages.splitlines()[-1].startswith("error: ") and message in messages
