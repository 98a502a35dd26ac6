import os
import signal

import numpy as np
import pytest

from benchmarks.soak import main
from benchmarks.soak_checks import different_losses, left_behind, per_step
from benchmarks.soak_events import draw_events


def records(*steps_and_losses):
    return [{"step": s, "loss": x, "grad_norm": 1.0} for s, x in steps_and_losses]


def test_a_step_that_is_missing_doubled_or_of_other_bits_is_found():
    whole = records((1, 2.0), (2, 1.5), (3, 1.25))
    assert different_losses(whole, whole) == []
    assert different_losses(whole, records((1, 2.0), (2, np.nextafter(1.5, 2)), (3, 1.25))) == [2]
    assert different_losses(whole, records((1, 2.0), (3, 1.25))) == [2]
    assert different_losses(whole, records((1, 2.0), (2, 1.5), (2, 1.5), (3, 1.25))) == [2]


def test_files_that_do_not_belong_there_are_found(tmp_path):
    (tmp_path / "run" / "checkpoints" / "12").mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert left_behind(tmp_path, {"run"}) == []
    (tmp_path / ".run.lock").touch()
    (tmp_path / "run" / "metrics.new").touch()
    (tmp_path / "run" / "checkpoints" / "13.orbax-checkpoint-tmp").mkdir()
    assert left_behind(tmp_path, {"run"}) == [
        ".run.lock", "run/checkpoints/13.orbax-checkpoint-tmp", "run/metrics.new",
    ]  # fmt: skip


def test_the_slope_of_memory_is_that_of_what_is_warm():
    samples = [(step, 1000 * min(step, 10) + 7 * step) for step in range(90)]
    assert per_step(samples) == pytest.approx(7)


def test_every_moment_and_signal_is_drawn():
    events = draw_events(2000, 10, np.random.default_rng(0))
    assert {event.kind for event in events} == {"step", "save", "compile", "disk", "data"}
    signals = {event.signal for event in events if event.signal is not None}
    assert signals == {signal.SIGKILL, signal.SIGTERM, signal.SIGINT}
    assert [event.after for event in events] == sorted(event.after for event in events)


@pytest.mark.skipif(
    os.environ.get("MTRAINING_TEST_SOAK") != "1", reason="takes minutes: MTRAINING_TEST_SOAK=1"
)
def test_a_small_run_that_is_ended_five_times(tmp_path, capsys):
    options = ["--cpu", "--steps=60", "--stops=3", "--every=10"]
    assert main([f"--out={tmp_path / 'soak'}", *options]) == 0
    assert "all as it should be" in capsys.readouterr().out
