"""Worker processes that compile at the same time and then measure one after another.

Python takes longer to trace kernels than the GPU takes to run them, so every problem gets its own
process. The parent (`measure`) starts them. A worker compiles, waits for its turn (`my_turn`),
measures while nothing else runs, and sends its results (`send`, or `serve` for both). Needs no JAX.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]  # workers start here, so that `benchmarks` is importable
_READY, _SKIPPED, _SENT, _GO = "ready ", "skipped ", "sent ", "go"

Job = tuple[str, list[str]]  # name and command of a worker


def share_device() -> None:
    """Keeps JAX from reserving most of the GPU's memory, in this process and its workers."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def my_turn(about: str = "") -> bool:
    """Called by a worker that has compiled: waits until it may measure; False: it should exit."""
    print(_READY + about, flush=True)
    return sys.stdin.readline().strip() == _GO


def skip(reason: str) -> None:
    """Called by a worker that cannot run on this machine, before it exits."""
    print(_SKIPPED + reason, flush=True)


def send(value: Any) -> None:
    """Sends a JSON value to the parent."""
    print(_SENT + json.dumps(value), flush=True)


def serve(measure: Callable[[], Iterable[Any]]) -> None:
    """Called by a worker that has compiled: sends the results, once it is its turn."""
    if my_turn():
        for value in measure():
            send(value)


def command(module: str, *options: str, python: str = sys.executable) -> list[str]:
    """The command of a worker that runs a module."""
    return [python, "-m", module, *options]


def measure(
    jobs: Sequence[Job],
    at_once: int,
    receive: Callable[[Any], None],
    log: Callable[[str], None],
    seconds: float = 1800,
) -> None:
    """Runs a worker for every job, in order.

    Args:
        jobs: name and command of each.
        at_once: workers that compile at the same time; others follow as these finish.
        receive: called with each value that a worker sends.
        log: called with what workers say about themselves, and with each failure.
        seconds: after which a worker is killed that still compiles, or that still has its turn.
    """
    for first in range(0, len(jobs), at_once):
        _wave(jobs[first : first + at_once], receive, log, seconds)


def _wave(
    jobs: Sequence[Job], receive: Callable[[Any], None], log: Callable[[str], None], seconds: float
) -> None:
    started: list[subprocess.Popen] = []
    with ThreadPoolExecutor(len(jobs)) as pool:
        try:
            for _, arguments in jobs:
                process = subprocess.Popen(
                    arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
                )
                started.append(process)
            ready = []
            answers = pool.map(lambda x: _compiled(x, seconds), started)
            for (name, _), process, (kind, about) in zip(jobs, started, answers, strict=True):
                if kind == _READY:
                    ready.append((name, process))
                    if about:
                        log(f"{name}: {about}")
                else:
                    log(f"FAILED to compile: {name}" if kind is None else f"no {name} ({about})")
            for name, process in ready:
                if process.poll() is None:
                    process.stdin.write(_GO + "\n")
                    process.stdin.flush()
                with _killed_after(process, seconds):
                    while (sent := _read(process, _SENT))[0]:
                        receive(json.loads(sent[1]))
                    if process.wait() != 0:
                        log(f"FAILED to measure: {name}")
        finally:
            for process in started:
                process.kill()
                process.communicate()


@contextlib.contextmanager
def _killed_after(process: subprocess.Popen, seconds: float) -> Iterator[None]:
    late = threading.Timer(seconds, process.kill)
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


def _compiled(process: subprocess.Popen, seconds: float) -> tuple[str | None, str]:
    """What a worker says once it has compiled; it is killed if it takes too long."""
    with _killed_after(process, seconds):
        return _read(process, _READY, _SKIPPED)


def _read(process: subprocess.Popen, *prefixes: str) -> tuple[str | None, str]:
    """The next line with one of the prefixes, split after it; (None, "") at the end."""
    for text in process.stdout:
        for prefix in prefixes:
            if text.startswith(prefix):
                return prefix, text.removeprefix(prefix).strip()
    return None, ""
