"""The time that a machine is lent for, and the programs that are started in it."""

import os
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from experiments.measure import LATER

ROOT = Path(__file__).resolve().parents[1]
# A stopped run finishes its step and writes a checkpoint.
GRACE_SECONDS = 40


class Lease:
    """The time that is left, and the programs that are started in it.

    Args:
        minutes: from now.
    """

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    def left(self) -> float:
        """Seconds until nothing may run any more."""
        return self._end - time.monotonic()

    def start(self, command: list[str], folder: Path) -> int:
        """Runs a command until it ends, or asks it to stop when only the grace is left.

        Args:
            command: with its arguments.
            folder: of the runs; compiled programs are kept in it.

        Returns:
            Its exit status; 75 if there was no time to start it, or to end it.
        """
        return self._run(command, folder, None)

    def start_together(self, commands: dict[str, list[str]], folder: Path, jobs: int) -> list[str]:
        """Runs commands, several at a time, on one device; what they print goes into files.

        Args:
            commands: by a name, which the files FOLDER/NAME.log have too.
            folder: as in `start`.
            jobs: how many at a time.

        Returns:
            Names of those that did not end well.
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
        if log is not None:  # others want memory of the same device
            environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        print("$", " ".join(command), flush=True)
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log,
            stderr=None if log is None else subprocess.STDOUT,
        )  # fmt: skip
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
