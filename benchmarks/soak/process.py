"""The process of a run, started again and again and watched, and its data."""

import functools
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from benchmarks.soak.events import Event, Rhythm, logged_step
from benchmarks.workers import ROOT

NAMES = ("whole", "stopped")  # of the runs, the uninterrupted one first
_PATIENCE = 300  # seconds to wait for a moment
# Two runs share a GPU, and each needs a CUDA context.
_MEMORY_FRACTION = "0.4"


class SoakedRun:
    """A run that is started again and again.

    Args:
        out: folder with its configuration, NAME.toml.
        name: of the run.
        rhythm: of its audits and saves.

    Attributes:
        data: its file of tokens.
        checkpoints: its folder of them.
        step: last step that the current process logged; 0 before.
        memory: seconds since the first start, step, and resident bytes of the process, a few times
            per second.
    """

    def __init__(self, out: Path, name: str, rhythm: Rhythm) -> None:
        self._out, self._name, self._rhythm = out, name, rhythm
        self.data = out / "data" / f"{name}.npy"
        self.checkpoints = out / "runs" / name / "checkpoints"
        self.memory: list[tuple[float, int, int]] = []
        self.step = 0
        self._begin = time.monotonic()
        self._stopped_for_good = False

    def start(self) -> None:
        """Starts or resumes the run."""
        self.step, self._compiling = 0, False
        self._lines: list[str] = []
        command = ["train.py", "--config", f"{self._out}/{self._name}.toml"]
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / command[0]), *command[1:], f"--run.name={self._name}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self._out,
            env={"XLA_PYTHON_CLIENT_MEM_FRACTION": _MEMORY_FRACTION} | os.environ,
        )  # fmt: skip
        if self._stopped_for_good:
            self.process.kill()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        threading.Thread(target=self._watch, args=(self.process,), daemon=True).start()

    def wait(self) -> int:
        """Waits for the end of the process and of its output; returns its exit status."""
        status = self.process.wait()
        self._reader.join()
        return status

    def stop_for_good(self) -> None:
        """Kills the current process, and each that is started later."""
        self._stopped_for_good = True
        if hasattr(self, "process"):
            self.process.kill()

    def limit_files(self, size: int) -> None:
        """Limits the size of files that the process writes, as a full disk would."""
        if self.process.poll() is None:
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (size, size))

    def wait_for(self, event: Event) -> None:
        """Waits for the moment of an event, or for the end of the process."""
        give_up = time.monotonic() + _PATIENCE
        while time.monotonic() < give_up and self.process.poll() is None:
            if self._is_now(event):
                return
            time.sleep(0.0003)

    def _is_now(self, event: Event) -> bool:
        if event.kind == "compile":  # at any step: a run compiles when it starts
            return self._compiling
        if self.step < max(1, event.after):
            return False
        if event.kind == "audit":
            return self._rhythm.audit_follows(self.step)
        return event.kind != "save" or self.half_saved()

    def newest(self) -> int | None:
        """The step of the newest complete checkpoint."""
        if not self.checkpoints.is_dir():
            return None
        names = (path.name for path in self.checkpoints.iterdir())
        return max((int(name) for name in names if name.isdecimal()), default=None)

    def half_saved(self) -> bool:
        """Whether there is an incomplete checkpoint."""
        try:
            return any(not path.name.isdecimal() for path in self.checkpoints.iterdir())
        except OSError:
            return False

    def metrics_size(self) -> int:
        """Bytes of the metrics so far."""
        path = self.checkpoints.with_name("metrics.jsonl")
        return path.stat().st_size if path.is_file() else 0

    def lines(self) -> list[str]:
        """Output of the last process."""
        return list(self._lines)

    def _read(self) -> None:
        with self.process.stdout as printed:
            for line in printed:
                self._lines.append(line)
                self._compiling = self._compiling or line.startswith("compiling")
                self.step = logged_step(line) or self.step

    def _watch(self, process: subprocess.Popen) -> None:
        while process.poll() is None:
            try:
                pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            except (OSError, IndexError):
                return
            if pages:
                seconds = time.monotonic() - self._begin
                self.memory.append((seconds, self.step, pages * os.sysconf("SC_PAGE_SIZE")))
            time.sleep(0.2)


def make_data(path: Path, tokens: int, seed: int) -> None:
    """Writes a file of token ids, atomically; processes with the old file keep reading it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new.npy")
    np.save(new, _tokens(tokens, seed))
    new.replace(path)


@functools.cache
def _tokens(tokens: int, seed: int, vocab: int = 512) -> np.ndarray:
    """Token ids that mostly follow from the previous one: easy to learn."""
    rng = np.random.default_rng(seed)
    follows = rng.permutation(vocab).astype(np.uint16)
    surprises = rng.random(tokens) < 0.1
    drawn = rng.integers(vocab, size=tokens)
    found = np.empty(tokens, np.uint16)
    token = 0
    for i in range(tokens):
        token = drawn[i] if surprises[i] else follows[token]
        found[i] = token
    return found
