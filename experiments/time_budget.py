"""Runs commands within a time limit."""

import os
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from experiments.measure import LATER

ROOT = Path(__file__).resolve().parents[1]
# A run that receives SIGTERM finishes its step and writes a checkpoint.
GRACE_SECONDS = 40


class TimeBudget:
    """A time limit, and the commands that run within it.

    Args:
        minutes: the limit, from now.
    """

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    def left(self) -> float:
        """Seconds left."""
        return self._end - time.monotonic()

    def start(self, command: list[str], folder: Path) -> int:
        """Runs a command to its end, or sends SIGTERM when only the grace period is left.

        Args:
            command: program and arguments.
            folder: folder of the runs; it also holds the compilation cache.

        Returns:
            The exit status; 75 if there was not enough time.
        """
        return self._run(command, folder, None)

    def start_together(self, commands: dict[str, list[str]], folder: Path, jobs: int) -> list[str]:
        """Runs commands in parallel on one device; their output goes to FOLDER/NAME.log.

        Args:
            commands: the commands by name.
            folder: as in `start`.
            jobs: number of commands that run at a time.

        Returns:
            Names of the commands that failed or had no time.
        """
        folder.mkdir(parents=True, exist_ok=True)

        def one(name: str) -> int:
            with open(folder / f"{name}.log", "wb") as log:
                return self._run(commands[name], folder, log)

        with ThreadPoolExecutor(jobs) as pool:
            found = dict(zip(commands, pool.map(one, commands), strict=True))
        return [name for name, status in found.items() if status]

    def _run(self, command: Sequence[str], folder: Path, log: object) -> int:
        if self.left() < 2 * GRACE_SECONDS:
            return LATER
        environment = dict(os.environ)
        environment.setdefault("JAX_COMPILATION_CACHE_DIR", str((folder / "compiled").resolve()))
        environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1")
        if log is not None:  # parallel commands share the device memory
            environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        print("$", " ".join(command), flush=True)
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=None if log is None else subprocess.STDOUT,
        )
        try:
            return process.wait(self.left() - GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()
        try:
            status = process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return LATER
        return LATER if status else 0
