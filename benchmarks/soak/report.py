"""Checks of two soaked runs, as Markdown: bit-identical losses, files, and growth of memory."""

import dataclasses
import importlib.util
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import table_head, table_line
from benchmarks.soak.events import Event
from benchmarks.soak.process import NAMES, SoakedRun

# Lines of Markdown, and sentences about what is wrong.
Found = tuple[list[str], list[str]]
_COLUMNS = (
    "event", "meant for", "by", "where it fell", "exit status", "seconds to its end",
    "resumes from",
)  # fmt: skip
_FILES = {"checkpoints", "metrics.jsonl"}  # in the folder of a run
# Must be equal to the bit; the last ones exist in audited steps only.
_COMPARED = ("loss", "grad_norm", "density", "recall", "output_error", "local_gradient_cosine")
_WINDOWS = 20  # of memory samples; the least of a window is what stays in use


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process of the stopped run ended.

    Attributes:
        event: that ended it; None for the last process.
        fell: in which step, or part of the start.
        missed: whether it happened at another moment than intended.
        status: the exit status.
        seconds: from the signal to the end; without a signal, the whole time of the process.
        newest: step of the newest complete checkpoint.
        half: whether there was an incomplete one too.
    """

    event: Event | None
    fell: str
    missed: bool
    status: int
    seconds: float
    newest: int | None
    half: bool

    def row(self, number: int) -> str:
        """Its row of the table."""
        kind, after, name = "the rest", "", ""
        if self.event is not None:
            kind, after = self.event.kind, f", after step {self.event.after}"
            name = "" if self.event.signal is None else self.event.signal.name
        newest = "the start" if self.newest is None else f"step {self.newest}"
        return table_line([
            str(number), f"{kind}{after}", name, self.fell + " (missed)" * self.missed,
            str(self.status), f"{self.seconds:.1f}", newest + ", another half written" * self.half,
        ])  # fmt: skip


def what_ran(lines: Sequence[str]) -> list[str]:
    """Batch, devices and attention as a run prints them at its start."""
    wanted = ("  batch ", "  mesh ", "  attention ", "attention backend: ")
    return [f"- {' '.join(line.split())}" for line in lines if line.startswith(wanted)]


def table(ends: Sequence[Ended]) -> list[str]:
    """A row for each process, in order."""
    return [*table_head(_COLUMNS), *(end.row(i) for i, end in enumerate(ends, 1))]


def differences(runs: Path, complete: bool) -> Found:
    """Whether both runs are bit-identical; only common steps are compared if not `complete`."""
    expected, found = (read_metrics(runs / name) for name in NAMES)
    if not complete:
        last = min(max((x["step"] for x in run), default=0) for run in (expected, found))
        expected, found = ([x for x in run if x["step"] <= last] for run in (expected, found))
    if not expected:
        return ["- no step to compare"], ["no step to compare"]
    wrong = different_steps(expected, found)
    audits = sum("output_error" in record for record in expected)
    lines = [
        "- steps with a loss, gradient norm, density or audit that differs in any bit from the "
        f"uninterrupted run: {len(wrong)} of {len(expected)} ({audits} audited)",
        f"- loss {expected[0]['loss']:.3f} -> {expected[-1]['loss']:.3f}",
    ]
    return lines, [first_difference(expected, found, step) for step in wrong[:1]]


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run, one per step, without a last line that is half written."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def different_steps(
    expected: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]
) -> list[int]:
    """Steps that differ in any compared value, are missing, or were written twice."""
    one, other = _by_step(expected), _by_step(found)
    return sorted(step for step in one.keys() | other.keys() if one.get(step) != other.get(step))


def first_difference(
    expected: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]], step: int
) -> str:
    """Describes what differs in a step of `different_steps`."""
    one, other = (_by_step(records).get(step, []) for records in (expected, found))
    if len(one) != 1 or len(other) != 1:
        return f"step {step} was written {len(other)} times instead of {len(one)}"
    return f"step {step}: " + ", ".join(
        f"{name} {b!r} instead of {a!r}"
        for name, a, b in zip(_COMPARED, one[0], other[0], strict=True)
        if a != b
    )


def _by_step(records: Sequence[dict[str, Any]]) -> dict[int, list[tuple]]:
    steps: dict[int, list[tuple]] = {}
    for record in records:
        values = tuple(record.get(name) for name in _COMPARED)
        steps.setdefault(record["step"], []).append(values)
    return steps


def stop_times(ends: Sequence[Ended]) -> list[str]:
    """How long a run took to save and end after SIGTERM or SIGINT, except while compiling."""
    found = [
        end.seconds
        for end in ends
        if end.event is not None and end.event.kind != "compile" and end.status == 75
    ]
    if not found:
        return []
    return [f"- after SIGTERM or SIGINT: saved and ended in {min(found):.1f} to {max(found):.1f} s"]


def leftovers(runs: Path) -> Found:
    """Whether there are files that a run should have removed."""
    files = left_behind(runs, set(NAMES))
    return [f"- files left behind: {', '.join(files) or 'none'}"], [
        f"{name} was left behind" for name in files
    ]


def left_behind(folder: Path, names: Collection[str]) -> list[str]:
    """Unexpected files in the folder of the runs with these names."""
    wrong = [path for path in folder.iterdir() if path.name not in names]
    for name in names:
        wrong += [path for path in (folder / name).iterdir() if path.name not in _FILES]
        steps = list((folder / name / "checkpoints").iterdir())
        wrong += [path for path in steps if not path.name.isdecimal()]
        wrong += sorted(steps)[: max(0, len(steps) - 2)]
    return sorted(str(path.relative_to(folder)) for path in wrong)


def memory(whole: SoakedRun, stopped: SoakedRun, steps: int, picture: Path) -> Found:
    """Whether memory of the process or of the device grows; plots both."""
    lines, wrong = [], []
    of_process = [(step, size) for _, step, size in whole.memory if step]
    if of_process:
        slope, last = per_step(of_process) / 2**10, of_process[-1][1] / 2**20
        lines.append(
            f"- memory of the process: {slope:+.2f} KiB per step, at its end {last:,.0f} MiB"
        )
        if slope > 64 and steps >= 1000:  # in shorter runs, warm-up dominates
            wrong.append("memory of the process grows")
    names = ("step", "memory_bytes_in_use", "memory_bytes_peak")
    records = read_metrics(whole.checkpoints.parent)
    used = [tuple(x[name] for name in names) for x in records if x[names[1]] is not None]
    if used:
        slope, most = per_step([x[:2] for x in used]), used[-1][2] / 2**20
        lines.append(
            f"- memory of the device: {slope:+.1f} bytes per step, at most {most:,.0f} MiB"
        )
        if slope > 1024:
            wrong.append("memory of the device grows")
    if importlib.util.find_spec("matplotlib") is None:
        return [*lines, "- no plot of memory: it needs matplotlib"], wrong
    _draw({"uninterrupted": whole, "stopped": stopped}, used, picture)
    return [*lines, "", f"![Memory of processes and of the device]({picture.name})"], wrong


def per_step(samples: Sequence[tuple[int, int]]) -> float:
    """Slope of memory over steps in bytes, by least squares, without the first third of samples."""
    rest = np.array(samples[len(samples) // 3 :], np.float64).reshape(-1, 2)
    parts = [x for x in np.array_split(rest, _WINDOWS) if len(x)]
    least = np.array([x[x[:, 1].argmin()] for x in parts]).reshape(-1, 2)
    if len(least) < 2 or least[0, 0] == least[-1, 0]:
        return 0.0
    return float(np.polyfit(least[:, 0], least[:, 1], 1)[0])


def _draw(
    runs: dict[str, SoakedRun], on_device: Sequence[tuple[int, int, int]], path: Path
) -> None:
    """Plots memory of the processes, and of the device by step, bytes in use and peak."""
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    axes = figure.subplots(1, 2 if on_device else 1, squeeze=False)[0]
    for name, run in runs.items():
        points = [(seconds, size / 2**30) for seconds, _, size in run.memory]
        axes[0].plot(*np.array(points).reshape(-1, 2).T, ".", markersize=2, label=name)
    axes[0].set(xlabel="seconds", ylabel="GiB", title="resident memory of the process", ylim=0)
    axes[0].legend()
    if on_device:
        steps, used, most = np.array(on_device).T
        axes[1].plot(steps, used / 2**30, label="in use")
        axes[1].plot(steps, most / 2**30, label="peak so far")
        axes[1].set(xlabel="step", ylabel="GiB", title="memory of the device", ylim=0)
        axes[1].legend()
    figure.savefig(path, dpi=110)
