"""Runs commands within a time limit."""

import os
import subprocess
import time
from pathlib import Path

from experiments.measure import LATER

ROOT = Path(__file__).resolve().parents[1]
# A run that receives SIGTERM finishes its step and writes a checkpoint.
GRACE_SECONDS = 40


class TimeBudget:
    """A time limit in minutes from now, and the commands that run within it."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    def left(self) -> float:
        """Seconds left."""
        return self._end - time.monotonic()

    def start(self, command: list[str], folder: Path) -> int:
        """Runs a command to its end, or sends SIGTERM when only the grace period is left.

        The folder holds the compilation cache. Returns the exit status; 75 without enough time.
        """
        if self.left() < 2 * GRACE_SECONDS:
            return LATER
        environment = {
            "JAX_COMPILATION_CACHE_DIR": str((folder / "compiled").resolve()),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1",
        }
        print("$", " ".join(command), flush=True)
        process = subprocess.Popen(command, cwd=ROOT, env=environment | os.environ)
        try:
            return process.wait(self.left() - GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()
        try:
            return LATER if process.wait(GRACE_SECONDS) else 0
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return LATER
