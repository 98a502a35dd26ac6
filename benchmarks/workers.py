"""Processes that compile side by side and then measure one after another.

Tracing kernels takes Python longer than running them takes the GPU, so every problem has a
process of its own: the parent starts `script OPTIONS` for each (`measure`), which compiles, waits
for its turn (`my_turn`), and sends what it finds (`send`). Nothing else runs while one measures.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_READY, _SENT, _GO = "ready", "sent ", "go"


def my_turn() -> bool:
    """A worker is ready: waits until it may use the device; False: it should end."""
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
        at_once: that many compile at the same time, the next ones when these have measured.
        tell: gets what workers send.
        say: gets a line of progress, also of workers that fail.
        allowed: asked before a worker measures, may wait; False: nothing more is measured.
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
