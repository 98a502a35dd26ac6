"""Output at the end of a run."""

import json
import sys
import types
from dataclasses import replace

import pytest

from mtraining_jax.callbacks import Run
from mtraining_jax.reporting import goodput
from mtraining_jax.reporting.goodput import KINDS, Goodput, processes_text, time_text
from mtraining_jax.reporting.summary import already_complete
from mtraining_jax.training.loop import reporter
from mtraining_jax.training.loop.reporter import DispatchedStep, Reporter
from mtraining_jax.utils.errors import UserError
from tests.training.common import changed, tiny_config


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", "tiny", "--run.steps", "3"])
    monkeypatch.delenv("UV", raising=False)
    return changed(tiny_config(tmp_path), run={"steps": 3})


def test_next_steps_after_a_checkpoint_beyond_the_last_step(config, monkeypatch):
    said = "\n".join(already_complete(config, 200))
    assert "has a checkpoint of step 200, and run.steps = 3" in said
    command = "python train.py --config tiny --run.steps=400"
    assert f"{command}\n      continue training from step 200" in said
    monkeypatch.setenv("SLURM_STEP_NODELIST", "gpu[1-2]")
    assert f"  srun {command}\n" in "\n".join(already_complete(config, 200))


def test_training_continues_without_starting_from_scratch(config, monkeypatch):
    start = ["--checkpoint.resume=false"]
    monkeypatch.setattr(sys, "argv", ["train.py", "--config=tiny", "--run.epochs=3", *start])
    lines = already_complete(config, 3)
    (command,) = [line for line in lines if "continue training" in line]
    assert "python train.py --config=tiny --run.steps=6\n" in command
    (command,) = [line for line in lines if "start from scratch" in line]
    assert command.count("--checkpoint.resume=false") == 1


def test_the_first_hints_use_the_model(tmp_path, config, monkeypatch):
    monkeypatch.chdir(tmp_path)  # without generate.py
    text = changed(config, data={"source": "text", "seq_len": 2048}, checkpoint={"last_step": True})
    page, model = config.run.folder / "report.html", f"--model {config.run.folder}"
    page.parent.mkdir(parents=True)
    lines = already_complete(text, 3)
    first = lines[lines.index("next:") + 1 :]
    assert first[0].startswith(f"  python -m mtraining_jax generate {model} --prompt TEXT ")
    assert first[1].startswith(f"  python -m mtraining_jax evaluate {model} --tasks needle --len")
    page.touch()
    assert already_complete(text, 3)[2] == f"  open {page} in a browser"
    for without in (
        config,  # token files have no tokenizer
        changed(text, checkpoint={"last_step": False}),
    ):
        assert model not in "\n".join(already_complete(without, 3))


def test_no_larger_model_is_suggested_with_init_from(config):
    options = "--run.name=test_larger --model.num_layers=4"  # free, unlike a fixed name
    assert options in "\n".join(already_complete(config, 3))
    loaded = replace(config, model=replace(config.model, init_from="somewhere"))
    assert "num_layers" not in "\n".join(already_complete(loaded, 3))


def test_commands_quote_names_for_the_shell(config, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--config=tiny", "--run.name=a b"])
    said = "\n".join(already_complete(changed(config, run={"name": "a b"}), 3))
    assert "train.py --config=tiny '--run.name=a b_larger' --model.num_layers=4\n" in said


class Clock:
    """Replaces the clocks of goodput; starts of a machine have other monotonic times."""

    def __init__(self, monkeypatch):
        self.now = 1e9
        clocks = types.SimpleNamespace(time=lambda: self.now, perf_counter=lambda: self.now - 5e8)
        monkeypatch.setattr(goodput, "time", clocks)

    def step(self, counted, seconds, host_wait=0.0, data=0.0, program="train_step"):
        self.now += seconds
        counted.step(program, seconds, host_wait, data)


def shares(counted):
    record = counted.record([counted.step_timing])
    found = {kind: round(record[f"time_share/{kind}"] * record["wall_time"], 3) for kind in KINDS}
    return {kind: seconds for kind, seconds in found.items() if seconds}


def test_wall_time_is_split_by_kind_of_work_also_over_restarts(monkeypatch):
    clock = Clock(monkeypatch)
    first = Goodput()
    clock.now += 10
    first.started()
    clock.now += 20
    first.add("compile", 20)
    for _ in range(8):
        clock.step(first, 2.0, host_wait=0.5, data=0.25)
    clock.step(first, 9.0, program="dense_step")  # another program, which takes longer
    clock.step(first, 11.75)  # ten seconds above the median without data
    clock.now += 3  # not accounted for
    expected = {"steps": 24.75, "stalled": 10, "data": 2, "compile": 20, "starting": 10, "other": 3}
    assert shares(first) == expected
    saved = json.loads(json.dumps(first.state(finished=False)))
    clock.step(first, 1.0)  # lost
    clock.now += 60
    again = Goodput()
    again.go_to(saved)
    clock.now += 5
    again.started()
    clock.step(again, 2.0)
    expected |= {"steps": 26.75, "starting": 76}
    assert shares(again) == expected
    record = again.record([again.step_timing])
    assert record["wall_time"] == pytest.approx(sum(expected.values())) and record["restarts"] == 1
    assert time_text(record) == (
        "19.4% in steps, 55.2% starting, 14.5% compile, 7.3% stalled, 2.2% other, 1.5% data, of"
        " 138 s since the start, with 1 restart"
    )
    # A longer run of a finished one does not count the time between.
    done = again.state(finished=True)
    clock.now += 1000
    longer = Goodput()
    longer.go_to(done)
    assert shares(longer) == expected
    for state in ({"seconds": {}}, done | {"wall": "x"}, []):
        with pytest.raises(UserError, match="saved wall times of the run are not readable"):
            Goodput().go_to(state)


def test_step_times_vary_and_devices_wait_by_process(monkeypatch):
    clock, counted = Clock(monkeypatch), Goodput()
    for seconds in (60.0, 9.0, 1.0, 3.0):  # the first two warm up
        clock.step(counted, seconds, host_wait=seconds / 2)
    clock.step(counted, 50.0, host_wait=1.0, program="dense_step")  # fewer steps than the other
    assert counted.step_timing == {"step_deviation": 0.5, "host_wait": 1.0}
    record = counted.record([counted.step_timing, {}, {"step_deviation": 0.1, "host_wait": 7.0}])
    assert record["step_deviation_by_process"] == [0.5, 0.0, 0.1]
    assert processes_text(record) == (
        "step times vary by 50.0%; devices wait 7.000 s per step for process 2, 1.000 s for the"
        " median one"
    )
    assert processes_text(counted.record([counted.step_timing])) is None


def test_a_repeated_step_neither_stalls_nor_waits_during_its_first_pass(config, monkeypatch):
    clock = Clock(monkeypatch)
    monkeypatch.setattr(reporter, "time", goodput.time)
    monkeypatch.setattr(reporter, "step_record", lambda metrics, seconds, *_: dict(metrics))
    counted, records = Goodput(), []
    run = Run(config, types.SimpleNamespace(local_devices=()), True, print)
    watchdog = types.SimpleNamespace(end=lambda: None)
    callback = types.SimpleNamespace(measured=lambda metrics: None, step=records.append)
    reported = Reporter(run, [callback], watchdog, counted)

    def one_pass(step, held=False):  # 1/4 s after the pass before it
        begun = goodput.time.perf_counter() + 0.25
        clock.now += 2.25
        metrics = {"step": step, "loss": 1.0, "skipped_in_row": 0, "parameter_norms": {}}
        metrics["guard"] = types.SimpleNamespace(held=held)
        # The batch was read in 1 s, while the devices had work.
        how = {}, "train_step", begun, 1.0 if step == 9 else 0.125, False, None
        reported._report(DispatchedStep(metrics, *how))

    for step in range(1, 9):
        one_pass(step)
    for held in (True, True, False):
        one_pass(9, held)
    reported.close()
    assert records[-1]["data_seconds"] == 0.25
    assert shares(counted) == {"steps": 9 * 2.25 + 2 * 2.25 - 8 * 0.125 - 0.25, "data": 1.25}
    assert counted.step_timing == {"step_deviation": 0.0, "host_wait": 0.25}
