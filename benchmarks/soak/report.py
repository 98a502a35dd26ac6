"""What a soak found, in Markdown: a table of what happened, what is wrong, a picture of memory."""

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from benchmarks.soak.checks import (
    different_steps,
    first_difference,
    left_behind,
    per_step,
    read_metrics,
)
from benchmarks.soak.events import Event
from benchmarks.soak.process import Soaked

# Of the runs: the uninterrupted one first.
NAMES = ("whole", "stopped")
# Lines of Markdown, and sentences about what is not as it should be.
Found = tuple[list[str], list[str]]

_HEAD = (
    "| event | meant for | by | where it fell | exit status | seconds to its end | goes on from |",
    "|---|---|---|---|---|---|---|",
)


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process of the run that is stopped ended.

    Attributes:
        event: that ended it; None of the last one, which took the rest of the steps.
        fell: in which step, or part of the start.
        missed: whether that is another moment than the event's.
        status: the exit status.
        seconds: from the signal to the end; of others the whole time of the process.
        newest: step of the newest whole checkpoint.
        half: whether another lay beside it half written.
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
        fell = self.fell + (" (missed)" if self.missed else "")
        place = "the start" if self.newest is None else f"step {self.newest}"
        place += ", another half written" if self.half else ""
        return (
            f"| {number} | {kind}{after} | {name} | {fell} | {self.status} | {self.seconds:.1f} |"
            f" {place} |"
        )


def what_ran(lines: Sequence[str]) -> list[str]:
    """What a run says of itself at its start, as a list: its batch, its devices, its attention."""
    wanted = ("  batch ", "  mesh ", "  attention ", "attention backend: ")
    return [f"- {' '.join(line.split())}" for line in lines if line.startswith(wanted)]


def table(ends: Sequence[Ended]) -> list[str]:
    """The lines of the table, a row for each process in order."""
    return [*_HEAD, *(end.row(i) for i, end in enumerate(ends, 1))]


def differences(runs: Path, whole: bool) -> Found:
    """Whether both runs computed the same, to the bit.

    Args:
        runs: folder of both.
        whole: whether both took all their steps; else only those that both took are compared.
    """
    expected, found = (read_metrics(runs / name) for name in NAMES)
    if not whole:
        last = min(max((x["step"] for x in run), default=0) for run in (expected, found))
        expected, found = ([x for x in run if x["step"] <= last] for run in (expected, found))
    if not expected:
        return ["- no step to compare"], ["no step to compare"]
    wrong = different_steps(expected, found)
    audits = sum("output_error" in record for record in expected)
    lines = [
        f"- steps whose loss, gradient norm, density or audit differ to the bit from those of "
        f"the uninterrupted run: {len(wrong)} of {len(expected)} ({audits} audited)",
        f"- loss {expected[0]['loss']:.3f} -> {expected[-1]['loss']:.3f}",
    ]
    return lines, [f"{first_difference(expected, found, x)}" for x in wrong[:1]]


def times(ends: Sequence[Ended]) -> Found:
    """How long a run that was asked to stop took to save its state and to end."""
    found = [
        end.seconds
        for end in ends
        if end.event is not None and end.event.kind != "compile" and end.status == 75
    ]
    if not found:
        return [], []
    return [f"- asked to stop: saved and ended in {min(found):.1f} to {max(found):.1f} s"], []


def leftovers(runs: Path) -> Found:
    """Whether files lie there that should not."""
    files = left_behind(runs, set(NAMES))
    return [f"- files left behind: {', '.join(files) or 'none'}"], [
        f"{name} was left behind" for name in files
    ]


def memory(whole: Soaked, stopped: Soaked, steps: int, picture: Path) -> Found:
    """Whether memory grows, of the process and of the device.

    Args:
        whole, stopped: the runs.
        steps: of a whole run.
        picture: file for a picture of it.
    """
    lines, wrong = [], []
    of_process = [(step, size) for _, step, size in whole.memory if step]
    if of_process:
        slope, last = per_step(of_process) / 2**10, of_process[-1][1] / 2**20
        lines.append(
            f"- memory of the process: {slope:+.2f} KiB a step, at its end {last:,.0f} MiB"
        )
        if slope > 64 and steps >= 1000:  # in fewer, what warms up is most of it
            wrong.append("memory of the process grows")
    names = ("step", "memory_bytes_in_use", "memory_bytes_peak")
    records = read_metrics(whole.checkpoints.parent)
    used = [tuple(x[name] for name in names) for x in records if x[names[1]] is not None]
    if used:
        slope, most = per_step([x[:2] for x in used]), used[-1][2] / 2**20
        lines.append(f"- memory of the device: {slope:+.1f} bytes a step, at most {most:,.0f} MiB")
        if slope > 1024:
            wrong.append("memory of the device grows")
    if importlib.util.find_spec("matplotlib") is None:
        return [*lines, "- no picture of memory: it needs matplotlib"], wrong
    _draw({"uninterrupted": whole, "stopped": stopped}, used, picture)
    return [*lines, "", f"![Memory of processes and of the device]({picture.name})"], wrong


def _draw(runs: dict[str, Soaked], on_device: Sequence[tuple[int, int, int]], path: Path) -> None:
    """Draws memory of processes over time, and that of the device over steps if it is known.

    Args:
        runs: by name.
        on_device: step, bytes in use and most bytes so far, of the first of the runs.
        path: of the picture.
    """
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    axes = figure.subplots(1, 2 if on_device else 1, squeeze=False)[0]
    for name, run in runs.items():
        axes[0].plot(
            [seconds for seconds, _, _ in run.memory],
            [size / 2**30 for _, _, size in run.memory],
            ".", markersize=2, label=name,
        )  # fmt: skip
    axes[0].set(xlabel="seconds", ylabel="GiB", title="resident memory of the process", ylim=0)
    axes[0].legend()
    if on_device:
        steps, used, most = zip(*on_device, strict=True)
        axes[1].plot(steps, [x / 2**30 for x in used], label="in use")
        axes[1].plot(steps, [x / 2**30 for x in most], label="most so far")
        axes[1].set(xlabel="step", ylabel="GiB", title="memory of the device", ylim=0)
        axes[1].legend()
    figure.savefig(path, dpi=110)
