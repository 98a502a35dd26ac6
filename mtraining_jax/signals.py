"""Signals that ask a run to stop, and what the command does about them.

SIGTERM (of a scheduler), SIGINT (Ctrl-C) and SIGHUP (a terminal is gone) mean the same: stop, and
lose nothing. Before the first step there is nothing to lose, and the command ends at once. From
then on the loop looks at `StopSignals.requested` after each step. A second signal ends the process
where it stands, but not a second SIGHUP, as shell and kernel may each send one.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from types import FrameType, TracebackType
from typing import NoReturn, Self

from mtraining_jax.nobody import write_to_nobody

# EX_TEMPFAIL of sysexits.h: nothing is wrong, and the same command goes on later. Schedulers can be
# told to start a command with this status again.
EXIT_STOPPED = 75
# A step did not end: devices or processes wait for one that failed.
EXIT_STUCK = 1
# Seconds that the command gets to clean up when it is stopped before its first step.
_PATIENCE = 10
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_OUTPUTS = (1, 2)


class Stopped(BaseException):
    """The command was asked to stop; its text says where it stands.

    Like `KeyboardInterrupt` not an `Exception`, since it may be raised anywhere.
    """


class StopSignals:
    """Takes SIGTERM, SIGINT and SIGHUP in its `with` block; in another thread it takes nothing.

    A SIGHUP that is ignored, as with nohup, stays ignored.

    A second thread hears of every signal at once, also while the main thread compiles or waits in
    a collective, and ends the process where the main thread cannot.

    Attributes:
        requested: whether the run is to stop at the next chance.
    """

    def __init__(self) -> None:
        self.requested = False
        self._at_once = True
        self._together = False
        self._heard = 0
        self._timer: threading.Timer | None = None

    def stop_after_a_step(self) -> None:
        """From now on a signal sets `requested` and does not interrupt."""
        self._at_once = False

    def stop_together(self) -> None:
        """Says that other processes have been joined by `jax.distributed.initialize`.

        JAX has then taken SIGTERM, and tells all processes of it; others are handed on as SIGTERM.
        """
        self._together = True

    def __enter__(self) -> Self:
        self._taken = threading.current_thread() is threading.main_thread()
        if not self._taken:  # signals are the main thread's, and it has not asked for them
            return self
        self._before = {
            number: handler
            for number in _SIGNALS
            if (handler := signal.getsignal(number)) is not signal.SIG_IGN
            or number != signal.SIGHUP
        }
        self._terminals = [output for output in _OUTPUTS if os.isatty(output)]
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        for number in self._before:
            signal.signal(number, self._in_main_thread)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno())
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._taken:
            return
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._writer.close()
        self._thread.join()
        if self._timer is not None:
            self._timer.cancel()

    def _in_main_thread(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._at_once and not self._together:
            raise Stopped(f"{signal.Signals(number).name} came before the first step")
        self.requested = True

    def _listen(self) -> None:
        """Runs in the second thread; Python writes the number of each signal."""
        while number := self._reader.recv(1):
            self._hear(number[0])
        self._reader.close()

    def _hear(self, number: int) -> None:
        if number not in _SIGNALS:
            return
        name = signal.Signals(number).name
        if number == signal.SIGHUP:
            write_to_nobody(*self._terminals)
            if self._heard:
                return
        self._heard += 1
        if self._heard > 1:
            leave(128 + number, f"{name} a second time: stopped where it stood")
        if self._together and number != signal.SIGTERM:
            os.kill(os.getpid(), signal.SIGTERM)
        if self._at_once and not self._together:
            self._timer = threading.Timer(
                _PATIENCE, leave, (EXIT_STOPPED, f"{name} came before the first step")
            )
            self._timer.daemon = True
            self._timer.start()
            return
        with contextlib.suppress(OSError):  # of a terminal that is gone, before its signal came
            print(
                f"{name}: stopping after the step under way; a second one stops at once",
                file=sys.stderr, flush=True,
            )  # fmt: skip


def leave(status: int, sentence: str) -> NoReturn:
    """Ends the process without waiting for anything, from any thread.

    Args:
        status: of the process.
        sentence: that is printed on stderr.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"stopped: {sentence}\n".encode())
    os._exit(status)
