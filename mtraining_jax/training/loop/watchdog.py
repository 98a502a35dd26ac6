"""A watchdog for work that does not end: it warns, and later ends the run.

If a device fails, or a process leaves the loop, the others wait in a collective. A process that
waits there never returns, not even from the call that dispatches a step.
"""

import contextlib
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from mtraining_jax.utils.errors import UserError

# A longer pause of the watchdog's thread means that the process was suspended, in seconds.
_SUSPENDED = 30.0


def _slow(longest: float | None) -> float:
    """Seconds before a warning; the first step also loads kernels and connects devices."""
    return 300.0 if longest is None else max(60.0, 10.0 * longest)


@dataclasses.dataclass(eq=False)
class _Task:
    name: str
    since: float
    is_step: bool = False
    limited: bool = True
    messages: int = 0  # 1 after the warning, 2 after the limit


class HangWatchdog:
    """Watches steps and other blocking work in a separate thread.

    Steps may be dispatched before others end. Time in which the process was suspended, for example
    by a scheduler, does not count. After `limit` seconds `leave` ends the process with a message,
    from another thread; without it, the message is only reported. `slow` returns the seconds before
    a warning, given the longest earlier step, or None for other work.

    Attributes:
        progress: number of works that began or ended; in the same order on all processes of a run.
        slowest: returns which other process is behind, as text; empty if that is unknown.
    """

    def __init__(
        self,
        limit: float,
        report: Callable[[str], None],
        leave: Callable[[str], None] | None,
        slow: Callable[[float | None], float] = _slow,
        *,
        clock: Callable[[], float] = time.perf_counter,
        tick: float = 1.0,
    ) -> None:
        self._limit, self._report, self._leave, self._slow = limit, report, leave or report, slow
        self._clock, self._tick = clock, tick
        self._last_read, self._suspended = clock(), 0.0
        self._longest: float | None = None
        self.progress = 0
        self.slowest: Callable[[], str] = lambda: ""
        # Running steps; the first one counts from its dispatch or the end of the one before it.
        self._steps: deque[_Task] = deque()
        self._blocks: list[_Task] = []
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def begin(self, step: int) -> None:
        """Must be called before a step is dispatched."""
        with self._lock:
            self._steps.append(_Task(f"step {step}", self._now(), is_step=True))
            self.progress += 1

    def end(self) -> None:
        """Must be called when the first running step is finished."""
        with self._lock:
            now = self._now()
            self._longest = max(now - self._steps.popleft().since, self._longest or 0.0)
            if self._steps:
                self._steps[0].since = now
            self.progress += 1

    def phase(self) -> str:
        """What the process does, e.g. "step 4 and reading the batch of step 5"."""
        with self._lock:
            tasks = [*list(self._steps)[:1], *self._blocks]
        return " and ".join(task.name for task in tasks) or "between two tasks"

    @contextlib.contextmanager
    def watch(self, name: str, *, limited: bool = True) -> Iterator[Callable[[], None]]:
        """Watches the block like a step; blocks may overlap with steps and each other.

        `name` says what it does: "the evaluation after step 4". Without a limit there is only a
        warning. Yields a function that restarts the time of the block, after a part of its work.
        """
        with self._lock:
            task = _Task(name, self._now(), limited=limited)
            self._blocks.append(task)
            self.progress += 1

        def restart() -> None:
            with self._lock:
                task.since, task.messages = self._now(), 0

        try:
            yield restart
        finally:
            with self._lock:
                self._blocks.remove(task)
                self.progress += 1

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._tick):
            with self._lock:
                tasks = [*list(self._steps)[:1], *self._blocks]
                due = [message for task in tasks if (message := self._message(task)) is not None]
            for send, before, after in due:  # without the lock: `slowest` asks another process
                with contextlib.suppress(UserError):  # unwritable output will stop the run
                    send(f"{before}{self.slowest()}{after}")

    def _now(self) -> float:
        """Seconds without those in which the process was suspended; needs the lock."""
        now = self._clock()
        if now - self._last_read > _SUSPENDED:
            self._suspended += now - self._last_read
        self._last_read = now
        return now - self._suspended

    def _message(self, task: _Task) -> tuple[Callable[[str], None], str, str] | None:
        """The message that is due, if any: where it goes, and its parts around the slowest."""
        taken, longest = self._now() - task.since, self._longest if task.is_step else None
        if task.limited and taken >= self._limit and task.messages < 2:
            task.messages = 2
            return (
                self._leave,
                f"{task.name} did not end within {self._limit:.0f} s (run.step_timeout_seconds); "
                "most likely a device or process failed and the others wait for it",
                "; see the output above for the reason",
            )
        if taken >= self._slow(longest) and task.messages < 1:
            task.messages = 1
            before = "" if longest is None else f" (longest before: {longest:.1f} s)"
            end = f". The run stops at {self._limit:.0f} s (run.step_timeout_seconds)"
            return (
                self._report,
                f"warning: {task.name} has taken {taken:.0f} s so far{before}; a device or process "
                "may be waiting for another one",
                end if task.limited else "",
            )
        return None
