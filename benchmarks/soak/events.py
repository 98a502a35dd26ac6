"""Events that end a run, and the step in which they happened."""

import dataclasses
import re
import signal
from collections.abc import Sequence

import numpy as np

# Exit status after each signal: from the operating system, or after saving the state.
_STATUS = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 75, signal.SIGINT: 75}
_MOMENTS = ("audit", "save", "compile", "step")
_STEP = re.compile(r"step +(\d+)/")
_RECEIVED = re.compile(r"SIG(TERM|INT): stopping after the current step")


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that ends a run.

    Attributes:
        kind: audit, save, compile, step, disk or data.
        after: step that the run must have logged before.
        signal: signal to send; None for disk and data.
        status: expected exit status.
    """

    kind: str
    after: int
    signal: signal.Signals | None
    status: int

    def __str__(self) -> str:
        by = "" if self.signal is None else f", {self.signal.name}"
        return f"{self.kind} after step {self.after}{by}"


def draw_events(steps: int, stops: int, rng: np.random.Generator) -> list[Event]:
    """Draws moments in the order of their steps, alternating kinds and signals.

    The disk is full after a third of the run, and the data is replaced after two thirds.
    """
    after = np.sort(rng.integers(1, max(2, steps * 9 // 10), size=stops))
    kinds = [_MOMENTS[i % 4] for i in range(stops)]
    # With five or more, events of one kind differ in their signals.
    signals = [list(_STATUS)[(i // 4 if stops > 4 else i) % 3] for i in range(stops)]
    order = rng.permutation(stops)
    events = [
        Event(kinds[i], int(at), signals[i], _STATUS[signals[i]])
        for at, i in zip(after, order, strict=True)
    ]
    events += [Event("disk", steps // 3, None, 2), Event("data", steps * 2 // 3, None, 2)]
    return sorted(events, key=lambda event: event.after)


@dataclasses.dataclass(frozen=True)
class Rhythm:
    """Steps between two audits, the first one in step 1, and between two saves."""

    audit: int
    save: int

    def audits(self, step: int) -> bool:
        """Whether a step is audited."""
        return (step - 1) % self.audit == 0

    def audit_follows(self, step: int) -> bool:
        """Whether an audit comes right after the log line of a step, without a save between."""
        return self.audits(step + 1) and step % self.save != 0


def step_under_way(lines: Sequence[str]) -> int | None:
    """The step in which a signal arrived: the one after the last logged step, None without any.

    The output ends where SIGKILL ended it, and has a line for the arrival of SIGTERM and SIGINT.
    """
    last = None
    for line in lines:
        if _RECEIVED.match(line):
            break
        last = logged_step(line) or last
    return None if last is None else last + 1


def logged_step(line: str) -> int | None:
    """The number of the step that a line logs; None for any other line."""
    found = _STEP.match(line)
    return None if found is None else int(found.group(1))


def where_it_fell(lines: Sequence[str], rhythm: Rhythm) -> str:
    """When a signal arrived: `step 57`, `step 61, audited`, `compiling` or `its start`."""
    step = step_under_way(lines)
    if step is not None:
        return f"step {step}{', audited' if rhythm.audits(step) else ''}"
    compiling = sum(line.startswith("compiling ") for line in lines)
    if compiling > sum(line.startswith("compiled ") for line in lines):
        return "compiling"
    return "its first step" if compiling else "its start"
