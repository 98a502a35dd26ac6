"""What happens to a soaked run, and in which of its steps that was."""

import dataclasses
import re
import signal
from collections.abc import Sequence

import numpy as np

# How a run ends by each: as the operating system says, and with a saved state.
_STATUS = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 75, signal.SIGINT: 75}
_MOMENTS = ("audit", "save", "compile", "step")

# Lines of a run. What a signal asks for is printed as soon as the process hears of it.
_STEP = re.compile(r"step +(\d+)/")
_HEARD = re.compile(r"SIG(TERM|INT): stopping after the current step")


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that ends a run.

    Attributes:
        kind: the moment: audit, save, compile or step; or disk or data.
        after: step that must have been reported first.
        signal: that is sent, None of disk and data.
        status: the exit status that the run should have.
    """

    kind: str
    after: int
    signal: signal.Signals | None
    status: int

    def __str__(self) -> str:
        by = "" if self.signal is None else f", {self.signal.name}"
        return f"{self.kind} after step {self.after}{by}"


def draw_events(steps: int, stops: int, rng: np.random.Generator) -> list[Event]:
    """Random moments in the order of their steps; each kind and signal in turn.

    A full disk comes at a third of the run, another file of data at two thirds.
    """
    after = np.sort(rng.integers(1, max(2, steps * 9 // 10), size=stops))
    kinds = [_MOMENTS[i % 4] for i in range(stops)]
    # Of five or more, those of one kind differ in their signals.
    names = [list(_STATUS)[(i // 4 if stops > 4 else i) % 3] for i in range(stops)]
    order = rng.permutation(stops)
    events = [
        Event(kinds[i], int(at), names[i], _STATUS[names[i]])
        for at, i in zip(after, order, strict=True)
    ]
    events.append(Event("disk", steps // 3, None, 2))
    events.append(Event("data", steps * 2 // 3, None, 2))
    return sorted(events, key=lambda event: event.after)


@dataclasses.dataclass(frozen=True)
class Rhythm:
    """Which steps of a run are audited, and after which it saves its state.

    Attributes:
        audit, save: every so many steps; audits from step 1 on.
    """

    audit: int
    save: int

    def audits(self, step: int) -> bool:
        """Whether a step is audited."""
        return (step - 1) % self.audit == 0

    def audit_follows(self, step: int) -> bool:
        """Whether the next thing after the report of a step is an audit, and no save."""
        return self.audits(step + 1) and step % self.save != 0


def step_under_way(lines: Sequence[str]) -> int | None:
    """The step that ran when a signal reached a process: the one after the last that it reported.

    Args:
        lines: that it printed, with a line for each step. They end where SIGKILL ended it; of
            SIGTERM and SIGINT it said itself when it heard of them.

    Returns:
        The number of the step; None if the process had not reported any.
    """
    last = None
    for line in lines:
        if _HEARD.match(line):
            break
        if (found := _STEP.match(line)) is not None:
            last = int(found.group(1))
    return None if last is None else last + 1


def reported_step(line: str) -> int | None:
    """The number of the step that a line reports; None for any other line."""
    found = _STEP.match(line)
    return None if found is None else int(found.group(1))


def where_it_fell(lines: Sequence[str], rhythm: Rhythm) -> str:
    """The same in words: `step 57`, `step 61, audited`, `compiling`, `its start` before that.

    Args:
        lines: as `step_under_way` takes them.
        rhythm: of the run.
    """
    step = step_under_way(lines)
    if step is not None:
        return f"step {step}{', audited' if rhythm.audits(step) else ''}"
    compiling = sum(line.startswith("compiling ") for line in lines)
    if compiling > sum(line.startswith("compiled ") for line in lines):
        return "compiling"
    return "its first step" if compiling else "its start"
