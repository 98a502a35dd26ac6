"""The process of a run, started again and again and watched, and its data."""

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
# Two runs share a GPU, and each needs a CUDA context.
_MEMORY_FRACTION = "0.4"


class SoakedRun:
    """A run that is started again and again.

    Args:
        out: folder with its configuration, NAME.toml.
        name: of the run.
        rhythm: of its audits and saves.
        deadline: of `time.monotonic`, after which waiting raises TimeoutError.

    Attributes:
        data: its file of tokens.
        folder: its output.
        lines: output of the last process.
        step: last step that it logged; 0 before.
        memory: step, and resident bytes of the process, for each logged step.
    """

    def __init__(self, out: Path, name: str, rhythm: Rhythm, deadline: float) -> None:
        self._out, self._name, self._rhythm, self._deadline = out, name, rhythm, deadline
        self.data = out / "data" / f"{name}.npy"
        self.folder = out / "runs" / name
        self.memory: list[tuple[int, int]] = []
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        """Starts or resumes the run."""
        self.step, self.lines, self._compiling = 0, [], False
        options = "--config", f"{self._out}/{self._name}.toml", f"--run.name={self._name}"
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *options],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self._out,
            env={"XLA_PYTHON_CLIENT_MEM_FRACTION": _MEMORY_FRACTION} | os.environ,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait(self) -> int:
        """Waits for the end of the process and of its output; returns its exit status."""
        while self.running():
            time.sleep(0.01)
        self._reader.join()
        return self.process.wait()

    def wait_for(self, event: Event) -> None:
        """Waits for the moment of an event, or for the end of the process."""
        while self.running() and not self._is_now(event):
            time.sleep(0.0003)

    def wait_for_checkpoint(self) -> bool:
        """Waits for the first checkpoint; whether the process wrote one before it ended."""
        while self.running() and self.newest() is None:
            time.sleep(0.1)
        return self.newest() is not None

    def running(self) -> bool:
        """Whether the process runs; raises TimeoutError after the deadline."""
        if time.monotonic() > self._deadline:
            raise TimeoutError
        return self.process.poll() is None

    def kill(self) -> None:
        """Ends the process, if there is one."""
        if self.process is not None:
            self.process.kill()

    def limit_files(self) -> None:
        """Limits the size of its files, as a full disk would: metrics still fit."""
        metrics = self.folder / "metrics.jsonl"
        size = max(64 * 1024, 2 * metrics.stat().st_size if metrics.is_file() else 0)
        if self.process.poll() is None:
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (size, size))

    def newest(self) -> int | None:
        """The step of the newest complete checkpoint."""
        return max((int(name) for name in self._checkpoints() if name.isdecimal()), default=None)

    def half_saved(self) -> bool:
        """Whether there is an incomplete checkpoint."""
        return not all(name.isdecimal() for name in self._checkpoints())

    def _checkpoints(self) -> list[str]:
        try:
            return os.listdir(self.folder / "checkpoints")
        except OSError:
            return []

    def _is_now(self, event: Event) -> bool:
        if event.kind == "compile":  # at any step: a run compiles when it starts
            return self._compiling
        if self.step < max(1, event.after):
            return False
        if event.kind == "audit":
            return self._rhythm.audit_follows(self.step)
        return event.kind != "save" or self.half_saved()

    def _read(self) -> None:
        with self.process.stdout as printed:
            for line in printed:
                self.lines.append(line)
                self._compiling = self._compiling or line.startswith("compiling")
                if step := logged_step(line):
                    self.step = step
                    self._sample_memory()

    def _sample_memory(self) -> None:
        try:
            pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):  # the process has ended
            return
        if pages:
            self.memory.append((self.step, pages * os.sysconf("SC_PAGE_SIZE")))


def make_data(path: Path, tokens: int, seed: int, vocab: int = 512) -> None:
    """Writes token ids that mostly follow from the previous one, which is easy to learn.

    The file is replaced atomically; processes with the old file keep reading it.
    """
    rng = np.random.default_rng(seed)
    follows = rng.permutation(vocab).astype(np.uint16)
    found = rng.integers(vocab, size=tokens).astype(np.uint16)
    for i in np.flatnonzero(rng.random(tokens) > 0.1):
        found[i] = follows[found[i - 1]]
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new.npy")
    np.save(new, found)
    new.replace(path)
