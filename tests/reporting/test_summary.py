"""What a run says at its end."""

import sys

import pytest

from mtraining_jax.reporting.summary import already_complete
from tests.training.common import changed, tiny_config


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", "tiny", "--run.steps", "3"])
    monkeypatch.delenv("UV", raising=False)
    return changed(tiny_config(tmp_path), run={"steps": 3})


def test_a_checkpoint_beyond_the_last_step_is_what_a_run_goes_on_from(config):
    said = "\n".join(already_complete(config, 200))
    assert "has a checkpoint of step 200, and run.steps = 3" in said
    assert "python train.py --config tiny --run.steps=400\n      train on from step 200" in said


def test_the_size_of_a_model_from_a_checkpoint_is_not_to_be_changed(config):
    assert "--model.num_layers=4" in "\n".join(already_complete(config, 3))
    loaded = changed(config, model={"init_from": "somewhere"})
    assert "num_layers" not in "\n".join(already_complete(loaded, 3))
