"""The process of a soaked run: started again and again, watched, and ended at its moments."""

import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

from benchmarks.soak.events import Event, Rhythm, reported_step

ROOT = Path(__file__).resolve().parents[2]
# Seconds that a moment may take to come.
_PATIENCE = 300
# Two runs share a GPU, and the context of CUDA takes some of it twice.
_MEMORY_FRACTION = "0.4"


class Soaked:
    """A run that is started again and again.

    Args:
        out: folder with its configuration, NAME.toml.
        name: of the run.
        rhythm: of its audits and saves.

    Attributes:
        data: its file of tokens.
        checkpoints: its folder of them.
        step: reported last by the process that runs; 0 before.
        memory: seconds since this was made, step, and resident bytes of the process, a few times a
            second.
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
        """Starts the run, or goes on with it."""
        self.step, self._compiling = 0, False
        self._lines: list[str] = []
        env = {"XLA_PYTHON_CLIENT_MEM_FRACTION": _MEMORY_FRACTION} | os.environ
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), "--config", f"{self._out}/{self._name}.toml",
             f"--run.name={self._name}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self._out,
            env=env,
        )  # fmt: skip
        if self._stopped_for_good:
            self.process.kill()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        threading.Thread(target=self._watch, args=(self.process,), daemon=True).start()

    def wait(self) -> int:
        """Waits for the end of the process, and for the last of its lines; returns its status."""
        status = self.process.wait()
        self._reader.join()
        return status

    def stop_for_good(self) -> None:
        """Kills the process that runs, and each that is started later."""
        self._stopped_for_good = True
        if hasattr(self, "process"):
            self.process.kill()

    def limit_files(self, size: int) -> None:
        """From now on the process can write no file beyond so many bytes, as on a full disk."""
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
        if event.kind == "compile":  # wherever the run stands: it compiles when it starts
            return self._compiling
        if self.step < max(1, event.after):
            return False
        if event.kind == "audit":
            return self._rhythm.audit_follows(self.step)
        return event.kind != "save" or half_saved(self.checkpoints)

    def newest(self) -> int | None:
        """The step of the newest whole checkpoint."""
        if not self.checkpoints.is_dir():
            return None
        names = (path.name for path in self.checkpoints.iterdir())
        return max((int(name) for name in names if name.isdecimal()), default=None)

    def metrics_size(self) -> int:
        """Bytes of the metrics so far."""
        path = self.checkpoints.with_name("metrics.jsonl")
        return path.stat().st_size if path.is_file() else 0

    def lines(self) -> list[str]:
        """What the last process has printed."""
        return list(self._lines)

    def _read(self) -> None:
        with self.process.stdout as printed:
            for line in printed:
                self._lines.append(line)
                self._compiling = self._compiling or line.startswith("compiling")
                self.step = reported_step(line) or self.step

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


def half_saved(folder: Path) -> bool:
    """Whether a checkpoint lies there that is not whole yet."""
    try:
        return any(not path.name.isdecimal() for path in folder.iterdir())
    except OSError:
        return False
