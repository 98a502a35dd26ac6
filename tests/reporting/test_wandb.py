"""Weights & Biases, with a fake package."""

import sys
import types

import pytest

from mtraining_jax.reporting.writers import WandbWriter
from tests.training.common import tiny_config


@pytest.fixture
def started(monkeypatch):
    """The arguments of each `wandb.init`."""
    found = []
    run = types.SimpleNamespace(url=None)
    wandb = types.SimpleNamespace(init=lambda **given: found.append(given) or run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return found


def test_a_resumed_run_keeps_its_id_and_a_new_run_gets_another(tmp_path, started):
    config = tiny_config(tmp_path)
    config.run.folder.mkdir(parents=True)
    for last_step in (0, 4, 0):
        WandbWriter(config, last_step)
    first, resumed, restarted = (given["id"] for given in started)
    assert first == resumed != restarted
    assert all(given["name"] == "test" for given in started)
