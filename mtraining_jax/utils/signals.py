"""Graceful shutdown on signals.

SIGTERM (preemption), SIGINT (Ctrl-C) and SIGHUP (closed terminal) stop the run after the current
step with a checkpoint. Before the first step they stop it immediately. A second signal kills the
process, except for SIGHUP, which shell and kernel may both send.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn, Self

from mtraining_jax.utils.printable import print_message, printable

# EX_TEMPFAIL of sysexits.h: the same command resumes the run; schedulers can requeue on it.
EXIT_STOPPED = 75
# A device or process failed, and the others would wait for it.
EXIT_FAILED = 1
# Seconds to clean up when stopped before the first step.
_PATIENCE = 10
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(BaseException):
    """A signal stopped the command; like `KeyboardInterrupt`, not an `Exception`."""

    printed = False  # by process 0, for all processes of a run


class StopSignals:
    """Context manager that handles SIGTERM, SIGINT and SIGHUP; main thread only.

    SIGHUP stays ignored if it was (nohup). A listener thread sees signals immediately, even while
    the main thread compiles or waits in a collective, and can exit the process.

    Attributes:
        requested: whether the run should stop after the current step.
    """

    def __init__(self) -> None:
        self.requested = False
        self._immediate = True  # a signal stops the command, not only the run
        self._together = False
        self._before: dict[signal.Signals, Any] = {}  # handlers, if ours are installed
        self._notify_jax: Callable[[int], None] | None = None
        self._received = 0
        self._timer: threading.Timer | None = None

    def stop_after_a_step(self) -> None:
        """From now on signals set `requested` instead of interrupting."""
        self._immediate = False

    def stop_together(self) -> None:
        """Call after `jax.distributed.initialize`, which takes over SIGTERM.

        JAX's handler makes all processes stop after the same step, but ignores further signals.
        So SIGTERM is handled here again, and the first signal of any kind is passed on to JAX.
        """
        self._together = True
        if self._before and (handler := _c_handler(signal.SIGTERM)) != self._own_c_handler:
            self._notify_jax = ctypes.CFUNCTYPE(None, ctypes.c_int)(handler)
            signal.signal(signal.SIGTERM, self._in_main_thread)

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}
        if self._before[signal.SIGHUP] is signal.SIG_IGN:
            del self._before[signal.SIGHUP]
        self._terminals = [output for output in (1, 2) if os.isatty(output)]
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        for number in self._before:
            signal.signal(number, self._in_main_thread)
        self._own_c_handler = _c_handler(signal.SIGTERM)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno())
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._handle_unraisable
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._before:
            return
        sys.unraisablehook = self._unraisable
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._writer.close()
        self._thread.join()
        if self._timer is not None:
            self._timer.cancel()

    def _in_main_thread(self, number: int, _: FrameType | None) -> None:
        if self._immediate and not self._together:
            raise Stopped(_before_first_step(number))
        self.requested = True

    def _handle_unraisable(self, ignored: Any) -> None:
        """Exits if Python would ignore `Stopped`, raised in a callback of garbage collection."""
        if isinstance(ignored.exc_value, Stopped):
            exit_immediately(EXIT_STOPPED, str(ignored.exc_value))
        self._unraisable(ignored)

    def _listen(self) -> None:
        """Runs in the listener thread; Python writes the number of each signal to the socket."""
        while number := self._reader.recv(1):
            if number[0] in _SIGNALS:
                self._receive(number[0])
        self._reader.close()

    def _receive(self, number: int) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGHUP:
            redirect_to_devnull(*self._terminals)
            if self._received:
                return
        self._received += 1
        if self._received > 1:
            exit_immediately(128 + number, f"{name} received twice, exited immediately")
        if self._notify_jax is not None:
            self._notify_jax(signal.SIGTERM)
        if self._immediate and not self._together:
            arguments = EXIT_STOPPED, _before_first_step(number)
            self._timer = threading.Timer(_PATIENCE, exit_immediately, arguments)
            self._timer.daemon = True
            self._timer.start()
            return
        sentence = "stopping after the current step; a second one stops immediately"
        print_message(f"{name}: {sentence}")


def _before_first_step(number: int) -> str:
    return f"{signal.Signals(number).name} received before the first step"


def exit_immediately(status: int, sentence: str) -> NoReturn:
    """Exits the process immediately, from any thread, with a message on stderr."""
    with contextlib.suppress(OSError):
        os.write(2, printable(f"stopped: {sentence}\n").encode())
    os._exit(status)


def _c_handler(number: int) -> int:
    """Returns the address of the C function that handles a signal."""
    action = (ctypes.c_void_p * 32)()  # struct sigaction: the handler, then mask and flags
    ctypes.CDLL(None).sigaction(number, None, action)
    return action[0] or 0


def redirect_to_devnull(*outputs: int) -> None:
    """Redirects file descriptors to /dev/null, e.g. those of a closed terminal."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    for output in outputs:
        os.dup2(devnull, output)
    os.close(devnull)
