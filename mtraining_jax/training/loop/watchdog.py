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

_TICK = 10.0  # longest sleep of the thread, seconds


def _slow(longest: float | None) -> float:
    """Seconds before a warning; the first step also loads kernels and connects devices."""
    return 300.0 if longest is None else max(60.0, 10.0 * longest)


@dataclasses.dataclass(eq=False)
class _Task:
    name: str
    since: float
    is_step: bool = False
    messages: int = 0


class HangWatchdog:
    """Watches steps and other blocking work in a separate thread.

    Steps may be dispatched before others end. Time in which the process was suspended, for example
    by a scheduler, does not count. After `limit` seconds `leave` ends the process with a message,
    from another thread; without it, the message is only reported. `slow` returns the seconds before
    a warning, given the longest earlier step, or None for other work.
    """

    def __init__(
        self,
        limit: float,
        report: Callable[[str], None],
        leave: Callable[[str], None] | None,
        slow: Callable[[float | None], float] = _slow,
        *,
        clock: Callable[[], float] = time.perf_counter,
        tick: float = _TICK,
    ) -> None:
        self._limit, self._report, self._leave, self._slow = limit, report, leave, slow
        self._clock, self._tick = clock, tick
        self._longest: float | None = None
        # Running steps; the first one counts from its dispatch or the end of the one before it.
        self._steps: deque[_Task] = deque()
        self._blocks: list[_Task] = []
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def begin(self, step: int) -> None:
        """Must be called before a step is dispatched."""
        with self._changed:
            self._steps.append(_Task(f"step {step}", self._clock(), is_step=True))
            self._changed.notify()

    def end(self) -> None:
        """Must be called when the first running step is finished."""
        with self._changed:
            now = self._clock()
            self._longest = max(now - self._steps.popleft().since, self._longest or 0.0)
            if self._steps:
                self._steps[0].since = now
            self._changed.notify()

    @contextlib.contextmanager
    def watch(self, name: str) -> Iterator[Callable[[], None]]:
        """Watches the block like a step; blocks may overlap with steps and each other.

        `name` says what it does: "the evaluation after step 4". Yields a function that restarts the
        time of the block, after a part of its work.
        """
        task = _Task(name, self._clock())

        def restart() -> None:
            with self._changed:
                task.since, task.messages = self._clock(), 0

        with self._changed:
            self._blocks.append(task)
            self._changed.notify()
        try:
            yield restart
        finally:
            with self._changed:
                self._blocks.remove(task)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                tasks = [*list(self._steps)[:1], *self._blocks]
                if not tasks:
                    self._changed.wait()
                    continue
                seconds = min(self._check(task) for task in tasks)
                starts, before = [task.since for task in tasks], self._clock()
                self._changed.wait(min(seconds, self._tick))
                asleep = self._clock() - before
                if asleep > 3 * self._tick:
                    for task, since in zip(tasks, starts, strict=True):
                        if task.since == since:
                            task.since += asleep

    def _check(self, task: _Task) -> float:
        """Prints messages that are due; returns the seconds until the next one may be."""
        taken = self._clock() - task.since
        slow = self._slow(self._longest if task.is_step else None)
        due = [(slow, self._warn)] if slow < self._limit else []
        due = [*due, (self._limit, self._abort)]
        for seconds, message in due[task.messages :]:
            if taken < seconds:
                return seconds - taken
            task.messages += 1
            with contextlib.suppress(UserError):  # unwritable output will stop the run anyway
                message(task, taken)
        return self._tick

    def _warn(self, task: _Task, taken: float) -> None:
        before = ""
        if task.is_step and self._longest is not None:
            before = f" (longest before: {self._longest:.1f} s)"
        self._report(
            f"warning: {task.name} has taken {taken:.0f} s so far{before}; a device or process may "
            f"be waiting for another one. The run stops at {self._limit:.0f} s "
            "(run.step_timeout_seconds)"
        )

    def _abort(self, task: _Task, _: float) -> None:
        (self._leave or self._report)(
            f"{task.name} did not end within {self._limit:.0f} s (run.step_timeout_seconds); most "
            "likely a device or process failed and the others wait for it; see the output above "
            "for the reason"
        )
