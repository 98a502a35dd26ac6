import contextlib
import io
import json
import os
import pty
import subprocess
import sys
import tracemalloc
import types

import jax
import numpy as np
import pytest
from rich.console import Console

from mtraining_jax.callbacks import Run
from mtraining_jax.parallel.mesh import make_mesh
from mtraining_jax.reporting import writers
from mtraining_jax.reporting.audit import audit_record
from mtraining_jax.reporting.history import KEPT, History
from mtraining_jax.reporting.progress import Display, step_line
from mtraining_jax.reporting.record import step_record
from mtraining_jax.reporting.summary import summary
from mtraining_jax.reporting.writers import JsonlWriter, open_writers
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.signals import redirect_to_devnull
from tests.training.common import VERTICAL_SLASH, changed, tiny_config, written


@pytest.fixture
def config(tmp_path):
    config = tiny_config(tmp_path, sparsity=VERTICAL_SLASH, metrics={"tensorboard": True})
    config.run.folder.mkdir(parents=True)
    return config


def record(config, step, loss=2.0, seconds=0.5, layers=(), devices=(), labels=254):
    layers = {"density": np.array([0.25, 0.5]), "executed": np.array([0.5, 0.75]), **dict(layers)}
    metrics = {
        "step": step,
        "loss": loss,
        "grad_norm": 1.0,
        "labels": labels,
        "real_tokens": 250,
        "lr": 1e-3,
        "skipped": 1,
        "layers": layers,
    }
    return step_record(metrics, seconds, config, devices or jax.devices())


def start(display, config):
    state = types.SimpleNamespace(step=0)
    display.start(Run(config, make_mesh(1, 1, 1), True, display.say), state)


def test_a_record_in_numbers(config):
    found = record(config, 3)
    assert found["tokens"] == 3 * 2 * 128 and found["tokens_per_second"] == 512
    assert found["density"] == 0.375 and found["density_per_layer"] == [0.25, 0.5]
    # Two products forward, five backward, 2 D FLOP per pair each.
    pairs = 2 * 2 * 6 * (128 * 129 // 2)  # sequences, layers, heads
    dense = 7 * 2 * 16 * pairs
    assert found["attention_flops_dense_equivalent"] == dense
    assert found["attention_flops_executed"] == dense * 0.625
    # Two layers: q, o of 32 x 96, k, v of 32 x 48, three of 32 x 40; and the output layer.
    matrices = 6 * 256 * (2 * (2 * 32 * 96 + 2 * 32 * 48 + 3 * 32 * 40) + 32 * 61)
    assert found["flops_executed"] == matrices + dense * 0.625
    assert found["flops_dense_equivalent"] == matrices + dense
    # One of the five backward products is a recomputation, not model FLOP.
    assert found["flops_model"] == pytest.approx(matrices + 6 * 2 * 16 * pairs * 0.375)
    # Half a second on four devices.
    assert found["tflops_per_device_executed"] == found["flops_executed"] / 2 / 1e12
    assert found["tflops_per_device_dense_equivalent"] == (matrices + dense) / 2 / 1e12
    assert found["mfu"] is None and found["memory_bytes_peak"] is None


def test_frozen_matrices_have_no_gradient_to_compute(config):
    layers, head = 2 * (2 * 32 * 96 + 2 * 32 * 48 + 3 * 32 * 40), 32 * 61
    parts = {
        "layers.self_attn": 6 * 2 * (2 * 32 * 96 + 2 * 32 * 48) + 4 * (2 * 3 * 32 * 40 + head),
        "norm": 4 * (layers + head),
        "embed_tokens": 4 * layers + 6 * head,  # tied
    }
    for part, expected in parts.items():
        partial = changed(config, optimizer={"trainable": [part]})
        found = record(partial, 3)
        matrices = found["flops_executed"] - found["attention_flops_executed"]
        assert matrices == pytest.approx(256 * expected), part


def test_speed_counts_padding_and_untrained_tokens_but_says_so(config):
    assert "  512 tokens/s  " in step_line(record(config, 3), 10)
    found = record(config, 3, labels=60)
    text = "512 tokens/s (500 real, 120 trained)"
    assert f"  {text}  " in step_line(found, 10)
    assert f"after warm-up), {text}, " in "\n".join(summary(config, History([found] * 3), []))
    assert found["real_tokens"] == 250 and found["labels"] == 60


def test_flop_with_documents_count_pairs_within_documents(config):
    # The densities are ratios of summed pairs, not means over sequences.
    layers = {
        "document_pairs": [0.25, 0.25],
        "density": [0.9, 0.9],
        "executed": [0.95, 0.95],
        "computed_pairs": [0.0625, 0.125],
        "executed_pairs": [0.125, 0.1875],
    }
    whole, packed = record(config, 3), record(config, 3, layers=layers)
    assert "computed_pairs" not in packed and "executed_pairs" not in packed
    for name in ("executed", "dense_equivalent"):
        name = f"attention_flops_{name}"
        assert packed[name] == whole[name] / 4
    matrices = whole["flops_executed"] - whole["attention_flops_executed"]
    model = matrices + (whole["flops_model"] - matrices) / 4
    assert packed["flops_model"] == pytest.approx(model)
    assert packed["density"] == whole["density"] and packed["document_pairs"] == 0.25


def test_a_gpu_has_a_peak_rate_and_memory(config):
    devices = [
        types.SimpleNamespace(
            device_kind="NVIDIA H200",
            memory_stats=lambda i=i: {"bytes_in_use": i << 30, "peak_bytes_in_use": (9 - i) << 30},
        )
        for i in (1, 3, 2)
    ]
    found = record(config, 1, devices=devices)
    assert (found["memory_bytes_in_use"], found["memory_bytes_peak"]) == (3 << 30, 8 << 30)
    assert found["mfu"] == pytest.approx(found["flops_model"] / 0.5 / 4 / 989.4e12)
    found |= {"mfu": 0.4321, "tflops_per_device_executed": 412.3}
    for dense, text in ((4123.0, "4123"), (41.23, "41.2"), (0.4123, "0.412")):
        found["tflops_per_device_dense_equivalent"] = dense
        rates = f"412 TFLOP/s per device executed  {text} dense-equivalent  MFU 43.2%"
        assert f"{rates}  memory 3.0 GiB, peak 8.0" in step_line(found, 10)


def test_all_output_of_a_replay_is_marked(config, capsys):
    config = changed(config, sparsity={"kind": "benchmarks.replay:Replay"})
    layers = {"estimated_density": np.array([0.9, 1.0])}
    found = record(config, 1, layers=layers)
    assert found["sparsity"] == "replayed density, not chosen"
    assert found["replayed_density"] == 0.375 and "density" not in found
    assert found["estimated_density_per_layer"] == [0.9, 1.0]
    assert (
        "density 37.5% (replayed density, not chosen; selection, run for timing only, had 95.0%)"
        in step_line(found, 10)
    )
    assert "(replayed density, not chosen)" in step_line(record(config, 1), 10)
    lines = summary(config, History([found]), [])
    lines = [line for line in lines if "%" in line or "tokens/s" in line]
    assert len(lines) == 2
    assert all(line.endswith("; replayed density, not chosen") for line in lines)
    console = Console(force_terminal=True, width=300, highlight=False, soft_wrap=True)
    display = Display(console=console)
    start(display, changed(config, run={"steps": 10}))
    display.step(found)
    display.close()
    assert "replayed density, not chosen" in capsys.readouterr().out


def test_the_summary_excludes_warm_up_and_traced_steps(config):
    times = [9.0, 5.0, 2.0, 1.0, 3.0, 8.0, 8.0]
    records = [record(config, i, seconds=s) for i, s in enumerate(times, 1)]
    for traced in records[5:]:
        traced["profiled"] = True
    (speed,) = [line for line in summary(config, History(records), []) if "speed" in line]
    assert "2.000 s/step (median of 3 steps after warm-up), 128 tokens/s" in speed
    assert "  loss       2.000 -> 2.000" in summary(config, History(records), [])  # of one step
    (speed,) = [line for line in summary(config, History(records[:1]), []) if "speed" in line]
    assert "9.000 s/step (last step)" in speed
    (speed,) = [line for line in summary(config, History(records[:3]), []) if "speed" in line]
    assert "2.000 s/step (one step after warm-up)" in speed


def test_dense_steps_of_a_sparse_run_are_reported_separately(config):
    config = changed(config, run={"steps": 6}, sparsity={"dense_interval": 3})
    whole = {"density": np.ones(2), "executed": np.ones(2)}
    records = [
        record(config, i, seconds=8.0 if i % 3 == 0 else 2.0, layers=whole if i % 3 == 0 else ())
        for i in range(1, 7)
    ]
    assert [x.get("dense_step") for x in records] == [None, None, True] * 2
    dense = records[2]
    assert dense["attention_flops_executed"] == dense["attention_flops_dense_equivalent"]
    assert "density 100.0% (dense step)" in step_line(dense, 6)
    text = "\n".join(summary(config, History(records), []))
    assert "speed      2.000 s/step (median of 2 sparse steps after warm-up)" in text
    assert "dense      2 of the 6 steps: 8.000 s/step (median of 2)" in text
    assert "attention  37.5% of the causal pairs computed in the 4 sparse steps" in text
    for i, one in enumerate(records, 1):
        one["memory_bytes_peak"] = i * 2**30
    text = "\n".join(summary(config, History(records), []))
    assert "dense-equivalent, peak memory 6.0 GiB" in text  # that of the last dense step
    # Of all steps, also those before the checkpoint; unknown in older checkpoints.
    for saved, lowest in ((None, 0.0), (0.25, 0.25), (0.5, 0.375)):
        history = History()
        history.restore(2, saved)
        history.step(dense), history.step(records[3])
        assert history.save() == lowest
    only = "\n".join(summary(config, History([dense]), []))
    assert "speed      8.000 s/step (last step)" in only and "dense      " not in only
    assert "attention  all of the causal pairs computed, in 1 dense step" in only


def test_summary_of_a_long_run(config):
    losses = [9.0, float("nan"), *[2.0] * KEPT, *[1.0] * 10]
    history = History()
    for i, loss in enumerate(losses, 1):
        found = record(config, i, loss=loss, seconds=0.5)
        found["recall"] = 0.25 if i % 2 else 0.75
        if i in (3, 7, 11):
            found["eval_loss"] = 1.0 + i
        history.step(found)
    assert len(history.last) == KEPT and history.count == len(losses)
    lines = summary(config, history, ["here"])
    assert f"done: {len(losses):,} steps in {0.5 * len(losses):.0f} s" in lines
    text = "\n".join(lines)
    assert f"0.500 s/step (median of the last {KEPT} steps after warm-up)" in text
    assert "loss       9.000 -> 1.000 (mean of the last 10 steps)" in text
    assert "validation 4.0000 -> 12.0000" in text
    assert "with 50.0% of the attention mass (recall)" in text


def test_non_finite_numbers_are_null(config):
    found = record(config, 1, loss=float("nan"))
    assert found["loss"] is None
    assert "NaN" not in json.dumps(found)
    assert "loss not finite" in step_line(found, 10)


def test_jsonl_of_a_killed_run_continues_from_the_checkpoint(config, capsys):
    path = config.run.folder / "metrics.jsonl"
    config = changed(config, metrics={"tensorboard": False})
    for last_step, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        (writer,) = open_writers(config, last_step)
        for step in steps:
            writer.write(record(config, step, loss=10 * last_step + step))
        writer.close()
        with path.open("a") as file:
            file.write('{"step": 5, "lo')  # truncated line
    assert [(r["step"], r["loss"]) for r in written(config)] == [(1, 1), (2, 2), (3, 23), (4, 24)]
    assert capsys.readouterr().err == ""
    rest = "".join(path.read_text().splitlines(keepends=True)[1:])
    for before_step_1 in "", '{"step": 0, "eval_loss": 2.0}\n':
        path.write_text(before_step_1 + rest)
        open_writers(config, 4)[0].close()
        assert "jsonl has no line for 1 of the 4 steps so far" in capsys.readouterr().err


def test_metrics_of_a_long_run_are_not_read_into_memory(config):
    path, peaks = config.run.folder / "metrics.jsonl", []
    lines = [json.dumps({"step": n, "recall_per_head": [0.5] * 5000}) + "\n" for n in range(1, 61)]
    for _ in range(3):  # threads of other tests may allocate, too
        path.write_text("".join(lines))
        tracemalloc.start()
        try:
            JsonlWriter(config, 59).close()
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert [r["step"] for r in written(config)] == list(range(1, 60))
    assert path.stat().st_size > 14 * 10**5 > 3 * min(peaks)


def test_tensorboard_gets_every_number(config):
    from tensorboardX.proto import event_pb2

    config = changed(config, sparsity={"kind": "benchmarks.replay:Replay"})
    writers = open_writers(config, 0)
    for writer in writers:
        audit = audit_record({"recall": np.array([[0.5, 0.9], [0.7, 0.8]])})
        writer.write(record(config, 1) | audit | {"alarms": ["layer 0 head 0 is low"]})
        writer.close()
    (events,) = (config.run.folder / "tensorboard").iterdir()
    content, tags = events.read_bytes(), set()
    while content:  # length, its checksum, an event, its checksum
        size = int.from_bytes(content[:8], "little")
        event = event_pb2.Event.FromString(content[12 : 12 + size])
        tags |= {value.tag for value in event.summary.value}
        content = content[16 + size :]
    assert {"train/loss", "train/tokens_per_second", "replayed_density_per_layer/01"} <= tags
    assert not any("sparsity" in tag for tag in tags)  # text
    assert {"train/recall_worst", "recall_worst_per_layer/01", "alarms/text_summary"} <= tags
    assert b"layer 0 head 0 is low" in events.read_bytes()
    assert not any("per_head" in tag for tag in tags)


def test_a_full_disk_is_reported_once(config, monkeypatch):
    from tensorboardX.record_writer import RecordWriter

    def full(self):
        raise OSError(28, "No space left on device")

    config = changed(config, metrics={"jsonl": False})
    (late,), (early,) = open_writers(config, 0), open_writers(config, 0)
    early.write(record(config, 1))
    late.write(record(config, 1))
    monkeypatch.setattr(RecordWriter, "flush", full)
    (later,) = open_writers(config, 0)
    with pytest.raises(UserError, match="the first error"), contextlib.closing(later):
        raise UserError("the first error")
    with pytest.raises(UserError, match="tensorboard cannot be written .No space left on device."):
        late.close()
    monkeypatch.setattr(writers, "_PATIENCE", 0.0)
    with pytest.raises(OSError, match="No space left"):
        early.write(record(config, 2))
    early.close()


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


def test_error_if_output_cannot_be_written():
    class Full(io.StringIO):
        def flush(self):
            raise OSError(28, "No space left on device")

    display = Display(console=Console(file=Full()))
    with pytest.raises(UserError, match="output cannot be written .No space left on device.; the"):
        display.say("a line")
    display.say("discarded")


def test_a_closed_pipe_does_not_end_a_run():
    code = """if True:
        import os
        from mtraining_jax.reporting.progress import Display
        reader, writer = os.pipe()
        os.close(reader)
        for outputs in ((1,), (1, 2)):  # as with | and with 2>&1 |
            for output in outputs:
                os.dup2(writer, output)
            display = Display()
            display.say("a line")
            display.say("another")
        os._exit(3)  # still runs
    """
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, check=False)
    assert done.returncode == 3
    assert done.stderr == b"note: the output is closed; the command continues\n"


def test_a_closed_terminal_does_not_end_a_run_before_its_signal():
    ours, theirs = pty.openpty()
    with open(theirs, "w") as file:
        display = Display(console=Console(file=file, force_terminal=True))
        display.say("first")
        assert b"first" in os.read(ours, 100)
        os.close(ours)
        display.say("second", "third")  # a failed write without error
        display.say("fourth")
        redirect_to_devnull(theirs)  # discards buffers, as for standard output


@pytest.mark.parametrize("terminal", [False, True])
def test_display_shows_loss_and_eta(config, terminal, capsys):
    console = Console(force_terminal=terminal, width=120, highlight=False, soft_wrap=True)
    display = Display(console=console)
    display.say("a [line] as it is")
    start(display, changed(config, run={"steps": 10, "log_interval": 3}))
    for step in (1, 2, 3):
        display.step(record(config, step))
    display.close()
    printed = capsys.readouterr().out
    assert "a [line] as it is" in printed
    assert "step  1/10  loss 2.0000" in printed and "step  2/10" not in printed
    assert "density 37.5%" in printed and "skipped 1" in printed
    assert "ETA" in printed
    assert ("━" in printed) == terminal


def test_the_eta_on_a_terminal_counts_long_steps_and_pauses(config):
    display = Display(console=Console(file=io.StringIO(), force_terminal=True))
    start(display, changed(config, run={"steps": 10}))
    clock = types.SimpleNamespace(now=0.0)
    (task,) = display._bar.tasks
    display._bar.get_time = task._get_time = lambda: clock.now
    for step, seconds in enumerate((100, 40, 40, 340), 1):  # an evaluation before the last one
        clock.now += seconds
        display.step(record(config, step))
    assert task.time_remaining == 6 * 420 / 3  # the first step is slow
    display.close()


def test_display_of_other_processes_is_silent(config, capsys):
    display = Display(enabled=False)
    display.say("nothing")
    start(display, changed(config, run={"steps": 10}))
    display.step(record(config, 1))
    display.close()
    assert capsys.readouterr().out == ""


def test_statistics_of_a_pattern_are_reported_under_their_own_names(config):
    found = record(config, 1, layers={"near_share": np.array([0.25, 0.75])})
    assert found["near_share"] == 0.5 and found["near_share_per_layer"] == [0.25, 0.75]
    with pytest.raises(UserError, match="'loss' must be renamed"):
        record(config, 1, layers={"loss": np.array([1.0, 2.0])})
