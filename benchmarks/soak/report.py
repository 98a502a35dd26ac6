"""Checks of two soaked runs, as Markdown: bit-identical losses, files, and growth of memory."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import table_head, table_line
from benchmarks.result_file import read_lines
from benchmarks.soak.events import Event
from benchmarks.soak.process import NAMES, SoakedRun

# Lines of Markdown, and sentences about what is wrong.
Found = tuple[list[str], list[str]]
Steps = dict[int, list[dict[str, Any]]]  # compared values of the records of each step
_COLUMNS = (
    "event", "meant for", "by", "where it fell", "exit status", "seconds to its end",
    "resumes from",
)  # fmt: skip
# In the folder of a run; faults have a check of their own.
_FILES = {
    "checkpoints", "config.toml", "faults.jsonl", "metrics.jsonl", "report.html", "starts.jsonl",
}  # fmt: skip
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
    expected, found = (_by_step(read_metrics(runs / name)) for name in NAMES)
    steps = expected.keys() | found.keys()
    if not complete:
        last = min(max(run, default=0) for run in (expected, found))
        steps = {step for step in steps if step <= last}
    if not steps:
        return ["- no step to compare"], ["no step to compare"]
    wrong = [step for step in sorted(steps) if expected.get(step) != found.get(step)]
    first, last, audited = (
        expected.get(min(steps)), expected.get(max(steps)),
        sum(records[0]["output_error"] is not None for records in expected.values()),
    )  # fmt: skip
    losses = " -> ".join(f"{x[0]['loss']:.3f}" if x else "–" for x in (first, last))
    lines = [
        "- steps with a loss, gradient norm, density or audit that differs in any bit from the "
        f"uninterrupted run: {len(wrong)} of {len(steps)} ({audited} audited)",
        f"- loss {losses}",
    ]
    return lines, [_difference(step, expected, found) for step in wrong[:1]]


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run, one per step, without a last line that is half written."""
    return read_lines(folder / "metrics.jsonl")


def _by_step(records: Sequence[dict[str, Any]]) -> Steps:
    steps: Steps = {}
    for record in records:
        values = {name: record.get(name) for name in _COMPARED}
        steps.setdefault(record["step"], []).append(values)
    return steps


def _difference(step: int, expected: Steps, found: Steps) -> str:
    one, other = expected.get(step, []), found.get(step, [])
    if len(one) != 1 or len(other) != 1:
        return f"step {step} was written {len(other)} times instead of {len(one)}"
    return f"step {step}: " + ", ".join(
        f"{name} {other[0][name]!r} instead of {value!r}"
        for name, value in one[0].items() if value != other[0][name]
    )  # fmt: skip


def stop_times(ends: Sequence[Ended]) -> list[str]:
    """How long a run took to save and end after SIGTERM or SIGINT, except while compiling."""
    found = [
        end.seconds for end in ends
        if end.event is not None and end.event.kind != "compile" and end.status == 75
    ]  # fmt: skip
    if not found:
        return []
    return [f"- after SIGTERM or SIGINT: saved and ended in {min(found):.1f} to {max(found):.1f} s"]


def leftovers(runs: Path) -> Found:
    """Whether there are files that a run should have removed."""
    wrong = [path for path in runs.iterdir() if path.name not in NAMES]
    for folder in (runs / name for name in NAMES):
        wrong += [path for path in folder.iterdir() if path.name not in _FILES]
        steps = sorted((folder / "checkpoints").iterdir())
        wrong += [path for path in steps if not path.name.isdecimal()] + steps[:-2]
    names = sorted({str(path.relative_to(runs)) for path in wrong})
    return [f"- files left behind: {', '.join(names) or 'none'}"], [
        f"{name} was left behind" for name in names
    ]


def repeats(runs: Path) -> Found:
    """How many steps were computed again, and whether any had other bits."""
    folders = [runs / name for name in NAMES]
    again = sum(record.get("passes", 1) > 1 for x in folders for record in read_metrics(x))
    faults = [x / "faults.jsonl" for x in folders if (x / "faults.jsonl").exists()]
    lines = [f"- steps computed again: {again}, with other bits in {len(faults)} of the runs"]
    return lines, [f"{path.relative_to(runs)} reports a faulty device" for path in faults]


def memory(run: SoakedRun, steps: int) -> Found:
    """Whether memory of the process or of the device grows."""
    lines, wrong = [], []
    if run.memory:
        slope, last = per_step(run.memory) / 2**10, run.memory[-1][1] / 2**20
        lines.append(
            f"- memory of the process: {slope:+.2f} KiB per step, at its end {last:,.0f} MiB"
        )
        if slope > 64 and steps >= 1000:  # in shorter runs, warm-up dominates
            wrong.append("memory of the process grows")
    names = ("step", "memory_bytes_in_use", "memory_bytes_peak")
    used = [tuple(x[name] for name in names) for x in read_metrics(run.folder) if x[names[1]]]
    if used:
        slope, most = per_step([x[:2] for x in used]), used[-1][2] / 2**20
        lines.append(
            f"- memory of the device: {slope:+.1f} bytes per step, at most {most:,.0f} MiB"
        )
        if slope > 1024:
            wrong.append("memory of the device grows")
    return lines, wrong


def per_step(samples: Sequence[tuple[int, int]]) -> float:
    """Slope of memory over steps in bytes, by least squares, without the first third of samples."""
    rest = np.array(samples[len(samples) // 3 :], np.float64).reshape(-1, 2)
    parts = [x for x in np.array_split(rest, _WINDOWS) if len(x)]
    least = np.array([x[x[:, 1].argmin()] for x in parts]).reshape(-1, 2)
    if len(least) < 2 or least[0, 0] == least[-1, 0]:
        return 0.0
    return float(np.polyfit(least[:, 0], least[:, 1], 1)[0])
