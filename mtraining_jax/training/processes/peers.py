"""Notices when another process of the run is lost, and ends this one with a message.

Every process counts up in the key-value store of JAX's coordination service, and says there what
it does. Process 0 holds the store and watches the counters; the others read its verdict and watch
that the store answers. If process 0 is killed, XLA aborts the others at once: their message comes
from a handler of SIGABRT.
"""

import contextlib
import ctypes
import json
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed as jax_distributed  # its key-value store has no public name

from mtraining_jax.utils.signals import EXIT_FAILED, EXIT_STOPPED, exit_immediately

_COUNTERS, _VERDICTS = "mtraining/counters/", "mtraining/verdicts/"
_LOST, _FAILED = f"{_VERDICTS}lost", f"{_VERDICTS}failed"
_MAX_NAMED = 4  # processes in a message
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)


class PeerWatch:
    """Counts for this process and watches the others, in threads, until `close`.

    A survivor exits with `EXIT_STOPPED` if a process was lost, or with `EXIT_FAILED` if it failed.

    Args:
        timeout: seconds of silence after which a process is lost. Time in which this process was
            suspended does not count.

    Attributes:
        number: that of this process.
        advice: returns the end of the message: how to resume.
        status: returns what this process does (`phase`), and a number that grows with its work in
            the same way on all processes (`progress`).
        statuses: the newest ones of all processes; in process 0 only.
    """

    def __init__(self, timeout: float) -> None:
        self.advice: Callable[[], str] = lambda: "run the same command again"
        self.status: Callable[[], dict[str, Any]] = lambda: {"progress": 0, "phase": "starting"}
        self.statuses: dict[int, dict[str, Any]] = {}
        self._timeout, self._interval = timeout, min(1.0, timeout / 8)
        self._store: Any = jax_distributed.global_state.client
        self.number = jax.process_index()
        peers = range(1, jax.process_count()) if self.number == 0 else (0,)
        self._counters = dict.fromkeys(map(str, peers), "")
        self._closed = threading.Event()
        self._on_abort = _HANDLER(self._explain_abort)
        _handle_abort(ctypes.cast(self._on_abort, ctypes.c_void_p))
        for run, name in ((self._count, "heartbeat"), (self._watch, "peers")):
            threading.Thread(target=run, name=name, daemon=True).start()

    def close(self) -> None:
        """Ends the watch, when all processes have disconnected."""
        self._closed.set()
        _handle_abort(None)

    def announce(self, reason: str) -> None:
        """Ends the watch and, within seconds, the other processes, because this one fails."""
        self.close()
        message = _FAILED, f"process {self.number} failed ({reason})"
        sending = threading.Thread(target=self._set, args=message, daemon=True)
        sending.start()
        sending.join(self._timeout)  # the store may not answer
        self._let_others_read()

    def slowest(self) -> str:
        """Which processes are behind, by their progress: "; slowest: process 3 (step 4)"."""
        try:
            statuses = _statuses(self._store.key_value_dir_get(_COUNTERS))
        except Exception:  # the store may have ended with process 0
            return ""
        least = min(x["progress"] for x in statuses.values())
        behind = {n: x for n, x in sorted(statuses.items()) if x["progress"] == least}
        if len(behind) == jax.process_count():
            return f"; all {len(behind)} processes are at the same point"
        shown = [f"process {n} ({x['phase']})" for n, x in list(behind.items())[:_MAX_NAMED]]
        more = ["..."] if len(behind) > _MAX_NAMED else []
        return f"; slowest: {', '.join([*shown, *more])}"

    def wait_for_verdict(self) -> None:
        """Waits until the watch ends this process; returns if it finds no lost process."""
        # Process 0 waits for the others to read its verdict; all intervals may be late.
        time.sleep(self._timeout + 10 * self._interval)

    def _count(self) -> None:
        """Runs in a thread: counts up, and reads counters and verdicts."""
        number = 0
        while not self._closed.wait(self._interval):
            number += 1
            status = json.dumps({"count": number, **self.status()})
            self._set(f"{_COUNTERS}{self.number}", status)
            try:
                verdicts = dict(self._store.key_value_dir_get(_VERDICTS))
                counters = self._store.key_value_dir_get(_COUNTERS) if self.number == 0 else []
            except Exception:  # jaxlib has its own exception type; `_watch` notices the silence
                continue
            self.statuses = _statuses(counters)
            newest = {name.removeprefix(_COUNTERS): count for name, count in counters}
            newest |= {"0": str(number)}
            self._counters = {name: newest.get(name, "") for name in self._counters}
            for key, status in ((_FAILED, EXIT_FAILED), (_LOST, EXIT_STOPPED)):
                if key in verdicts:
                    self._leave(verdicts[key], status)

    def _watch(self) -> None:
        """Runs in a thread: ends the process when a counter stands still for too long."""
        seen, silent = dict(self._counters), dict.fromkeys(self._counters, 0.0)
        last = time.monotonic()
        while not self._closed.wait(self._interval):
            # A longer pause means that this process was suspended, perhaps with all others.
            elapsed, last = min(time.monotonic() - last, 2 * self._interval), time.monotonic()
            for name, counter in self._counters.items():
                silent[name] = 0.0 if counter != seen[name] else silent[name] + elapsed
                seen[name] = counter
                if silent[name] >= self._timeout:
                    lost = (
                        f"process {name} was lost: it did not answer for {self._timeout:g} s "
                        "(distributed.heartbeat_timeout_seconds)"
                    )
                    if self.number == 0:  # otherwise nobody is there to keep it
                        self._set(_LOST, lost)
                    self._leave(lost, EXIT_STOPPED)

    def _leave(self, what: str, status: int) -> None:
        if self._closed.is_set():
            return
        self._let_others_read()
        exit_immediately(status, f"{what}; see its output for the reason; {self.advice()}")

    def _let_others_read(self) -> None:
        if self.number == 0:  # the store ends with it
            time.sleep(3 * self._interval)

    def _explain_abort(self, number: int) -> None:
        del number
        what, status = "aborted by XLA; see its log above for the reason", EXIT_FAILED
        if self.number > 0:
            lost = "most likely because process 0 of the run ended or cannot be reached"
            what, status = f"aborted by XLA, {lost}; see its output for the reason", EXIT_STOPPED
        exit_immediately(status, f"{what}; {self.advice()}")

    def _set(self, key: str, value: str) -> None:
        with contextlib.suppress(Exception):  # the store may have ended with process 0
            self._store.key_value_set(key, value, allow_overwrite=True)


def _statuses(entries: list[tuple[str, str]]) -> dict[int, dict[str, Any]]:
    return {int(key.removeprefix(_COUNTERS)): json.loads(text) for key, text in entries}


def _handle_abort(handler: ctypes.c_void_p | None) -> None:
    """Sets a C handler of SIGABRT, since one of Python would only run after the abort."""
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    set_handler(signal.SIGABRT, handler)
