import json
import sys
import types

import numpy as np
import pytest
from rich.console import Console

from mtraining_jax.errors import UserError
from mtraining_jax.training.metrics import AttentionCost, open_writers, read_records, step_record
from mtraining_jax.training.progress import Display, step_line
from tests.training.common import changed, tiny_config


@pytest.fixture
def config(tmp_path):
    config = tiny_config(tmp_path, metrics={"tensorboard": True})
    config.run.folder.mkdir(parents=True)
    return config


def record(config, step, loss=2.0):
    layers = {"density": np.array([0.25, 0.5]), "executed": np.array([0.5, 0.75])}
    metrics = {
        "step": step, "loss": loss, "grad_norm": 1.0, "lr": 1e-3, "skipped": 1, "layers": layers,
    }  # fmt: skip
    return step_record(metrics, 0.5, config)


def test_a_record_in_numbers(config):
    found = record(config, 3)
    assert found["tokens"] == 3 * 2 * 128 and found["tokens_per_second"] == 512
    assert found["density"] == 0.375 and found["density_per_layer"] == [0.25, 0.5]
    dense = AttentionCost(config).dense_equivalent
    # Two products forward, five backward, 2 FLOP for each of D numbers and each pair.
    pairs = 2 * 2 * 2 * (128 * 129 // 2)  # sequences, layers, heads
    assert dense == 7 * 2 * 16 * pairs == found["attention_flops_dense_equivalent"]
    assert found["attention_flops_executed"] == dense * 0.625


def test_numbers_that_are_not_finite_are_null(config):
    found = record(config, 1, loss=float("nan"))
    assert found["loss"] is None
    assert "NaN" not in json.dumps(found)
    assert "loss not finite" in step_line(found, 10)


def test_jsonl_of_a_run_that_was_cut_off_goes_on_where_the_checkpoint_is(config):
    path = config.run.folder / "metrics.jsonl"
    config = changed(config, metrics={"tensorboard": False})
    for last_step, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        (writer,) = open_writers(config, last_step)
        for step in steps:
            writer.write(record(config, step, loss=10 * last_step + step))
        writer.close()
        with path.open("a") as file:
            file.write('{"step": 5, "lo')  # cut off in the middle of a line
    assert [(r["step"], r["loss"]) for r in read_records(path)] == [
        (1, 1), (2, 2), (3, 23), (4, 24),
    ]  # fmt: skip


def test_tensorboard_gets_every_number(config):
    from tensorboardX.proto import event_pb2

    writers = open_writers(config, 0)
    for writer in writers:
        writer.write(record(config, 1))
        writer.close()
    (events,) = (config.run.folder / "tensorboard").iterdir()
    content, tags = events.read_bytes(), set()
    while content:  # length, its checksum, an event, its checksum
        size = int.from_bytes(content[:8], "little")
        event = event_pb2.Event.FromString(content[12 : 12 + size])
        tags |= {value.tag for value in event.summary.value}
        content = content[16 + size :]
    assert {"train/loss", "train/tokens_per_second", "density_per_layer/01"} <= tags


def test_wandb_gets_records_with_their_step(config, monkeypatch):
    sent = []
    run = types.SimpleNamespace(
        url=None, log=lambda record, step: sent.append((step, record)), finish=lambda: None
    )
    wandb = types.SimpleNamespace(init=lambda **_: run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = changed(config, metrics={"tensorboard": False, "jsonl": False, "wandb": True})
    (writer,) = open_writers(config, 0)
    writer.write(record(config, 7))
    writer.close()
    assert [(step, r["loss"]) for step, r in sent] == [(7, 2.0)]


def test_writer_that_fails_closes_the_others(config):
    (config.run.folder / "tensorboard").write_text("in the way")
    with pytest.raises(UserError, match="metrics cannot be written"):
        open_writers(config, 0)


@pytest.mark.parametrize("terminal", [False, True])
def test_display_tells_loss_and_time_left(config, terminal, capsys):
    console = Console(force_terminal=terminal, width=120, highlight=False, soft_wrap=True)
    with Display(console=console) as display:
        display.say("a [line] as it is")
        display.start(0, 10)
        display.step(record(config, 1), line=True)
        display.step(record(config, 2), line=False)
        display.step(record(config, 3), line=True)
    printed = capsys.readouterr().out
    assert "a [line] as it is" in printed
    assert "step  1/10  loss 2.0000" in printed and "step  2/10" not in printed
    assert "density 37.5%" in printed and "skipped 1" in printed
    assert "ETA" in printed
    assert ("━" in printed) == terminal


def test_display_of_other_processes_is_silent(config, capsys):
    with Display(enabled=False) as display:
        display.say("nothing")
        display.start(0, 10)
        display.step(record(config, 1), line=True)
    assert capsys.readouterr().out == ""
