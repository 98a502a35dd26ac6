"""Worker processes that compile at the same time and then measure one after another.

Python takes longer to trace kernels than the GPU takes to run them, so every problem gets its own
process. The parent (`measure`) starts `python -m MODULE OPTIONS` for each. A worker compiles, waits
for its turn (`my_turn`), measures while nothing else runs, and sends its results (`send`).
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]  # workers start here, so that `benchmarks` is importable
_READY, _SENT, _GO = "ready", "sent ", "go"


def share_device() -> None:
    """Keeps JAX from reserving most of the GPU's memory, in this process and its workers."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def my_turn() -> bool:
    """Called by a worker that has compiled: waits until it may measure; False: it should exit."""
    print(_READY, flush=True)
    return sys.stdin.readline().strip() == _GO


def send(value: Any) -> None:
    """Sends a JSON value to the parent."""
    print(_SENT + json.dumps(value), flush=True)


def measure(
    module: str,
    jobs: Sequence[tuple[str, list[str]]],
    at_once: int,
    receive: Callable[[Any], None],
    log: Callable[[str], None],
    allowed: Callable[[], bool] = lambda: True,
) -> None:
    """Runs a worker for every job, in order.

    Args:
        module: what a worker runs.
        jobs: name and options of each.
        at_once: workers that compile at the same time; others follow as these finish.
        receive: called with each value that a worker sends.
        log: called with each line of progress and with each failure.
        allowed: called before a worker measures, and may wait; if False, the worker is skipped.
    """
    for first in range(0, len(jobs), at_once):
        _wave(module, jobs[first : first + at_once], receive, log, allowed)


def _wave(module, jobs, receive, log, allowed) -> None:
    started: list[tuple[str, subprocess.Popen]] = []
    try:
        for name, options in jobs:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            started.append((name, process))
        ready = []
        for name, process in started:
            if _read_until(process, _READY) is None:
                log(f"FAILED to compile: {name}")
            else:
                ready.append((name, process))
        for name, process in ready:
            if not allowed():
                log(f"no time left for {name}")
                continue
            if process.poll() is None:
                process.stdin.write(_GO + "\n")
                process.stdin.flush()
            while (text := _read_until(process, _SENT)) is not None:
                receive(json.loads(text))
            if process.wait() != 0:
                log(f"FAILED to measure: {name}")
    finally:
        for _, process in started:
            process.kill()
            process.communicate()


def _read_until(process: subprocess.Popen, prefix: str) -> str | None:
    """Returns the rest of the next line with the prefix; None at the end of the output."""
    for text in process.stdout:
        if text.startswith(prefix):
            return text.removeprefix(prefix)
    return None
