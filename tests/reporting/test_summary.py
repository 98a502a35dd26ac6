"""Output at the end of a run."""

import sys
from dataclasses import replace

import pytest

from mtraining_jax.reporting.summary import already_complete
from tests.training.common import changed, tiny_config


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", "tiny", "--run.steps", "3"])
    monkeypatch.delenv("UV", raising=False)
    return changed(tiny_config(tmp_path), run={"steps": 3})


def test_next_steps_after_a_checkpoint_beyond_the_last_step(config):
    said = "\n".join(already_complete(config, 200))
    assert "has a checkpoint of step 200, and run.steps = 3" in said
    command = "python train.py --config tiny --run.steps=400"
    assert f"{command}\n      continue training from step 200" in said


def test_training_continues_without_starting_from_scratch(config, monkeypatch):
    start = ["--checkpoint.resume=false"]
    monkeypatch.setattr(sys, "argv", ["train.py", "--config=tiny", "--run.epochs=3", *start])
    lines = already_complete(config, 3)
    (command,) = [line for line in lines if "continue training" in line]
    assert "python train.py --config=tiny --run.steps=6\n" in command
    (command,) = [line for line in lines if "start from scratch" in line]
    assert command.count("--checkpoint.resume=false") == 1


def test_no_larger_model_is_suggested_with_init_from(config):
    options = "--run.name=test_larger --model.num_layers=4"  # free, unlike a fixed name
    assert options in "\n".join(already_complete(config, 3))
    loaded = replace(config, model=replace(config.model, init_from="somewhere"))
    assert "num_layers" not in "\n".join(already_complete(loaded, 3))


def test_commands_quote_names_for_the_shell(config, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--config=tiny", "--run.name=a b"])
    said = "\n".join(already_complete(changed(config, run={"name": "a b"}), 3))
    assert "train.py --config=tiny '--run.name=a b_larger' --model.num_layers=4\n" in said
