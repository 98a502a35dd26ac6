"""Processes that compile side by side and then measure one after another.

Python takes longer to trace kernels than the GPU takes to run them, so every problem has its own
process. The parent (`measure`) starts `script OPTIONS` for each. A worker compiles, waits for its
turn (`my_turn`), measures while nothing else runs, and sends its results (`send`).
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_READY, _SENT, _GO = "ready", "sent ", "go"


def my_turn() -> bool:
    """Called by a worker that has compiled: waits until it may measure; False: it should end."""
    print(_READY, flush=True)
    return sys.stdin.readline().strip() == _GO


def send(value: Any) -> None:
    """Hands the parent something that JSON can hold."""
    print(_SENT + json.dumps(value), flush=True)


def measure(
    script: Path, jobs: Sequence[tuple[str, list[str]]], at_once: int, tell: Callable[[Any], None],
    say: Callable[[str], None], allowed: Callable[[], bool] = lambda: True,
) -> None:
    """Runs a worker for every job, in their order.

    Args:
        script: what a worker runs.
        jobs: name and options of each.
        at_once: number of workers that compile at the same time; others follow as these finish.
        tell: called with what a worker sends.
        say: called with each line of progress, also about workers that fail.
        allowed: called before a worker measures, and may wait; if False, nothing more is measured.
    """
    for first in range(0, len(jobs), at_once):
        _wave(script, jobs[first : first + at_once], tell, say, allowed)


def _wave(script, jobs, tell, say, allowed) -> None:
    started: list[tuple[str, subprocess.Popen]] = []
    try:
        for name, options in jobs:
            process = subprocess.Popen(
                [sys.executable, str(script.resolve()), *options],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            started.append((name, process))
        ready = []
        for name, process in started:
            if _read_until(process, _READY) is None:
                say(f"FAILED to compile: {name}")
            else:
                ready.append((name, process))
        for name, process in ready:
            if not allowed():
                say(f"no time left for {name}")
                continue
            if process.poll() is None:
                process.stdin.write(_GO + "\n")
                process.stdin.flush()
            while (text := _read_until(process, _SENT)) is not None:
                tell(json.loads(text))
            if process.wait() != 0:
                say(f"FAILED to measure: {name}")
    finally:
        for _, process in started:
            process.kill()
            process.communicate()


def _read_until(process: subprocess.Popen, prefix: str) -> str | None:
    """The rest of the next line with a prefix; None at the end of the output."""
    for text in process.stdout:
        if text.startswith(prefix):
            return text.removeprefix(prefix)
    return None
