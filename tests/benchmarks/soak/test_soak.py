"""The soak test: its events, what it compares and reports, and a run that cannot start."""

import functools
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.soak.__main__ import main
from benchmarks.soak.report import differences, leftovers, memory, per_step, repeats

STEPS = ["compiling the training step ...\n", "compiled in 2.0 s\n"]
STEPS += [f"step {i:2}/60  loss 2.0000  recall 91.0%\n" for i in range(1, 9)]


def differences_of(folder, whole, stopped, complete=True):
    """Compares two runs that wrote these records: step, loss and further values."""
    for name, records in (("whole", whole), ("stopped", stopped)):
        (folder / name).mkdir(exist_ok=True)
        lines = [json.dumps({"step": s, "loss": x, **more}) + "\n" for s, x, more in records]
        (folder / name / "metrics.jsonl").write_text("".join(lines) + '{"step": 9')
    (counts, losses), wrong = differences(folder, complete)
    return counts.partition("run: ")[2], wrong


def test_a_step_that_is_missing_doubled_or_of_other_bits_is_found(tmp_path):
    compared = functools.partial(differences_of, tmp_path)
    whole = [(1, 2.0, {"output_error": 0.1}), (2, 1.5, {}), (3, 1.25, {})]
    assert compared(whole, whole) == ("0 of 3 (1 audited)", [])
    other = [whole[0], (2, np.nextafter(1.5, 2), {}), whole[2]]
    counts, (wrong,) = compared(whole, other)
    assert counts == "1 of 3 (1 audited)"
    assert wrong.startswith("step 2: loss ") and wrong.endswith(" instead of 1.5")
    assert compared(whole, [whole[0], whole[2]])[1] == ["step 2 was written 0 times instead of 1"]
    doubled = [whole[0], whole[1], *whole[1:]]
    assert compared(whole, doubled)[1] == ["step 2 was written 2 times instead of 1"]
    assert compared(whole, whole[:2], complete=False) == ("0 of 2 (1 audited)", [])


def test_files_that_do_not_belong_there_are_found(tmp_path):
    for name in ("whole", "stopped"):
        (tmp_path / name / "checkpoints" / "12").mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").touch()
    assert leftovers(tmp_path) == (["- files left behind: none"], [])
    (tmp_path / ".run.lock").touch()
    (tmp_path / "whole" / "metrics.new").touch()
    (tmp_path / "whole" / "checkpoints" / "13.orbax-checkpoint-tmp").mkdir()
    names = [".run.lock", "whole/checkpoints/13.orbax-checkpoint-tmp", "whole/metrics.new"]
    assert leftovers(tmp_path) == (
        [f"- files left behind: {', '.join(names)}"], [f"{name} was left behind" for name in names],
    )  # fmt: skip


def test_steps_that_were_computed_again_are_counted_and_faults_found(tmp_path):
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    records = [{"step": 1}, {"step": 2, "passes": 2}, {"step": 3, "passes": 3}]
    (tmp_path / "whole/metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in records))
    assert repeats(tmp_path) == (
        ["- steps computed again: 2, with other bits in 0 of the runs"],
        [],
    )
    (tmp_path / "whole/faults.jsonl").touch()
    _, (wrong,) = repeats(tmp_path)
    assert wrong == "whole/faults.jsonl reports a faulty device"


def test_the_slope_of_memory_is_that_of_what_is_warm_and_stays():
    samples = [(step, 1000 * min(step, 10) + 7 * step) for step in range(90)]
    assert per_step(samples) == pytest.approx(7)
    passing = np.random.default_rng(0).integers(1, 2**27, size=90) * (np.arange(90) % 3 > 0)
    up_and_down = [(s, size + int(x)) for (s, size), x in zip(samples, passing, strict=True)]
    assert per_step(up_and_down) == pytest.approx(7, rel=0.05)
    assert per_step([]) == per_step(samples[:1]) == 0.0


def test_memory_that_grows_is_found(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            f'{{"step": {i}, "memory_bytes_in_use": {10**8 + 4096 * i}, "memory_bytes_peak": '
            f"{2**28}}}\n"
            for i in range(1, 1200)
        )
    )
    samples = [(2 * i, 2**30 + 2**20 * i) for i in range(1, 600)]
    lines, wrong = memory(SimpleNamespace(memory=samples, folder=tmp_path), 1200)
    assert wrong == ["memory of the process grows", "memory of the device grows"]
    assert lines[0].startswith("- memory of the process: +512.00 KiB per step")
    assert lines[1] == "- memory of the device: +4096.0 bytes per step, at most 256 MiB"


def test_a_run_that_cannot_start_is_told_at_once(tmp_path, capsys):
    assert main([f"--out={tmp_path / 'soak'}", "--cpu", "--kind=nothing"]) == 1
    output = capsys.readouterr()
    assert output.err.startswith("error: the run ended with status 2 before its first checkpoint:")
    assert 'sparsity.kind = "nothing"' in output.err
    assert output.out == ""  # no event was tried


@pytest.mark.skipif(
    os.environ.get("MTRAINING_TEST_SOAK") != "1", reason="takes minutes: MTRAINING_TEST_SOAK=1"
)
def test_a_small_run_that_is_ended_six_times_once_in_an_audit(tmp_path, capsys):
    assert main([f"--out={tmp_path / 'soak'}", "--cpu"]) == 0
    assert "All checks passed." in capsys.readouterr().out
    report = (tmp_path / "soak" / "REPORT.md").read_text()
    in_audit = [x for x in report.splitlines() if "| audit, " in x and "(missed)" not in x]
    assert len(in_audit) == 1 and ", audited | -9 |" in in_audit[0]
    assert "differs in any bit from the uninterrupted run: 0 of 60 (15 audited)" in report
