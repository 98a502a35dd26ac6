"""Reading checkpoints: what a read that fails leaves behind."""

import asyncio
import sys
import types

import pytest

from mtraining_jax.config import RopeScalingConfig, config_to_dict
from mtraining_jax.errors import UserError
from mtraining_jax.training import checkpoint
from mtraining_jax.training.checkpoint import Checkpoints
from tests.training.common import changed


class _Dying:
    """Makes a call as it is collected: Python can only report what that raises."""

    def __init__(self, call):
        self.call = call

    def __del__(self):
        self.call()


def test_only_reads_that_end_after_a_failed_one_go_unreported(config, tmp_path, monkeypatch):
    loop = asyncio.new_event_loop()
    loop.close()
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda x: reported.append(x.exc_type))

    checkpoints = Checkpoints(tmp_path, keep=1, async_save=False)
    with pytest.raises(UserError, match="damaged"):
        checkpoints.restore(3, None, config)
    checkpoints.close()
    _Dying(lambda: loop.call_soon_threadsafe(print))
    _Dying(lambda: 1 / 0)
    assert reported == [ZeroDivisionError]


def test_a_record_without_newer_fields_means_their_defaults(config, tmp_path):
    config = changed(config, model={"rope_scaling": RopeScalingConfig(factor=2.0)})
    saved = config_to_dict(config)
    abstract = types.SimpleNamespace(parameters={})

    def check(saved):
        checkpoint._check_same_model(tmp_path, saved, {}, abstract, config)

    del saved["model"]["rms_norm_eps"], saved["model"]["rope_scaling"]["truncate"]
    del saved["optimizer"]["trainable"]
    check(saved)
    saved["model"]["rope_scaling"]["beta_slow"] = 0.5
    with pytest.raises(UserError, match="of another model: model.rope_scaling = "):
        check(saved)
