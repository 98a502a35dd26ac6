"""A step that does not end: told while it runs, and the end of the run when it takes too long.

A device that has failed alone, or a process that is somewhere else, leaves the others waiting in a
collective. Nothing in a process that waits so comes back, not even the call that starts a step.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable

from mtraining_jax.errors import UserError

# A step is told of when it takes so many times the longest one before, and no fewer seconds.
_TIMES, _SECONDS = 10.0, 60.0
_FIRST = 300.0  # seconds of the first one, as kernels are loaded and devices connected
_TICK = 10.0  # seconds after which the thread wakes up at the latest


def _slow(longest: float | None) -> float:
    return _FIRST if longest is None else max(_SECONDS, _TIMES * longest)


class StepWatch:
    """Watches steps in a thread of its own. They may be started before others end.

    Time in which the whole process stood still, as a scheduler may suspend it, does not count.

    Args:
        limit: seconds that a step may take, `run.step_timeout_seconds`.
        tell: prints a sentence.
        leave: ends the process with a sentence, from another thread; None only tells.
        slow: seconds after which a step is told of, by the longest one before (None at first).
        clock: seconds.
        tick: seconds after which the thread wakes up at the latest.
    """

    def __init__(
        self,
        limit: float,
        tell: Callable[[str], None],
        leave: Callable[[str], None] | None,
        slow: Callable[[float | None], float] = _slow,
        *,
        clock: Callable[[], float] = time.perf_counter,
        tick: float = _TICK,
    ) -> None:
        self._limit, self._tell, self._leave, self._slow = limit, tell, leave, slow
        self._clock, self._tick = clock, tick
        self._longest: float | None = None
        self._steps: deque[int] = deque()  # under way
        self._since = 0.0  # when the first of them was started, or the one before it was done
        self._said = 0  # sentences of the first of them
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._watch, name="step watch", daemon=True)
        self._thread.start()

    def begin(self, step: int) -> None:
        """To be called before a step is started."""
        with self._changed:
            if not self._steps:
                self._next()
            self._steps.append(step)

    def end(self) -> None:
        """To be called when the first of the steps under way is done."""
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
        """Says what is to be said; returns the seconds until there may be more."""
        step, taken = self._steps[0], self._clock() - self._since
        slow = self._slow(self._longest)
        due = [(slow, self._say_slow)] if slow < self._limit else []
        due.append((self._limit, self._give_up))
        for seconds, say in due[self._said :]:
            if taken < seconds:
                return seconds - taken
            self._said += 1
            with contextlib.suppress(UserError):  # output that cannot be written stops the run soon
                say(step, taken)
        return self._tick

    def _say_slow(self, step: int, taken: float) -> None:
        before = "" if self._longest is None else f" (the longest before: {self._longest:.1f})"
        self._tell(
            f"step {step} has taken {taken:.0f} s so far{before}; perhaps a device or a process "
            f"waits for another one. The run waits for {self._limit:.0f} s "
            "(run.step_timeout_seconds)"
        )

    def _give_up(self, step: int, taken: float) -> None:
        del taken
        (self._leave or self._tell)(
            f"step {step} has not ended within run.step_timeout_seconds = {self._limit:.0f}; most "
            "likely a device or a process failed and others wait for it, and what was printed "
            "before says why"
        )
