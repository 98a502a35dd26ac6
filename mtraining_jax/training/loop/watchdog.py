"""A watchdog for steps that do not end: it warns, and later ends the run.

If a device fails, or a process leaves the loop, the others wait in a collective. A process that
waits there never returns, not even from the call that dispatches a step.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable

from mtraining_jax.errors import UserError

# Warn about a step after this many times the longest earlier step, but at least these seconds.
_TIMES, _SECONDS = 10.0, 60.0
_FIRST = 300.0  # seconds for the first step, which loads kernels and connects devices
_TICK = 10.0  # longest sleep of the thread, seconds


def _slow(longest: float | None) -> float:
    return _FIRST if longest is None else max(_SECONDS, _TIMES * longest)


class HangWatchdog:
    """Watches steps in a separate thread. Steps may be dispatched before others end.

    Time in which the process was suspended, for example by a scheduler, does not count.

    Args:
        limit: seconds that a step may take, `run.step_timeout_seconds`.
        report: prints a message.
        leave: ends the process with a message, from another thread; None only prints it.
        slow: seconds before a warning, given the longest earlier step (None for the first).
        clock: returns seconds.
        tick: longest sleep of the thread, seconds.
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
        self._steps: deque[int] = deque()  # running steps
        self._since = 0.0  # when the first of them was dispatched, or the one before it ended
        self._said = 0  # messages about the first of them
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._watch, name="step watch", daemon=True)
        self._thread.start()

    def begin(self, step: int) -> None:
        """Must be called before a step is dispatched."""
        with self._changed:
            if not self._steps:
                self._next()
            self._steps.append(step)

    def end(self) -> None:
        """Must be called when the first running step is finished."""
        with self._changed:
            seconds = self._clock() - self._since
            self._longest = max(seconds, self._longest or 0.0)
            self._steps.popleft()
            self._next()

    def close(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _next(self) -> None:
        self._since = self._clock()
        self._said = 0
        self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while not self._closed:
                if not self._steps:
                    self._changed.wait()
                    continue
                seconds, before, since = self._look(), self._clock(), self._since
                self._changed.wait(min(seconds, self._tick))
                asleep = self._clock() - before
                if asleep > 3 * self._tick and self._since == since:
                    self._since += asleep

    def _look(self) -> float:
        """Prints messages that are due; returns the seconds until the next one may be."""
        step, taken = self._steps[0], self._clock() - self._since
        slow = self._slow(self._longest)
        due = [(slow, self._warn)] if slow < self._limit else []
        due.append((self._limit, self._abort))
        for seconds, say in due[self._said :]:
            if taken < seconds:
                return seconds - taken
            self._said += 1
            with contextlib.suppress(UserError):  # unwritable output will stop the run anyway
                say(step, taken)
        return self._tick

    def _warn(self, step: int, taken: float) -> None:
        before = "" if self._longest is None else f" (longest before: {self._longest:.1f} s)"
        self._report(
            f"warning: step {step} has taken {taken:.0f} s so far{before}; a device or process may "
            f"be waiting for another one. The run stops at {self._limit:.0f} s "
            "(run.step_timeout_seconds)"
        )

    def _abort(self, step: int, taken: float) -> None:
        del taken
        (self._leave or self._report)(
            f"step {step} did not end within {self._limit:.0f} s (run.step_timeout_seconds); most "
            "likely a device or process failed and the others wait for it; see the output above "
            "for the reason"
        )
