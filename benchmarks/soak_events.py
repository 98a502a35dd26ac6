"""What happens to a soaked run, and the process to which it happens."""

import dataclasses
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
# How a run ends by each: as the operating system says, and with a saved state.
_STATUS = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 75, signal.SIGINT: 75}
_PATIENCE = 300


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that ends a run.

    Attributes:
        kind: the moment, compile, step or save; or disk or data.
        after: step that must have been reported first.
        signal: that is sent, None of disk and data.
        status: the exit status that the run should have.
    """

    kind: str
    after: int
    signal: signal.Signals | None
    status: int

    def __str__(self) -> str:
        by = "" if self.signal is None else f", {self.signal.name}"
        return f"{self.kind} after step {self.after}{by}"


def draw_events(steps: int, stops: int, rng: np.random.Generator) -> list[Event]:
    """Random moments in the order of their steps; each kind and signal in turn.

    A full disk comes at a third of the run, another file of data at two thirds.
    """
    after = np.sort(rng.integers(1, max(2, steps * 9 // 10), size=stops))
    kinds = [("step", "save", "compile")[i % 3] for i in range(stops)]
    names = [list(_STATUS)[i // 3 % 3 if stops > 3 else i % 3] for i in range(stops)]
    order = rng.permutation(stops)
    events = [
        Event(kinds[i], int(at), names[i], _STATUS[names[i]])
        for at, i in zip(after, order, strict=True)
    ]
    events.append(Event("disk", steps // 3, None, 2))
    events.append(Event("data", steps * 2 // 3, None, 2))
    return sorted(events, key=lambda event: event.after)


class Soaked:
    """A run that is started again and again.

    Args:
        out: folder with the configuration.
        name: of the run.

    Attributes:
        memory: step and resident bytes of the process, a few times a second.
    """

    def __init__(self, out: Path, name: str) -> None:
        self._out, self._name = out, name
        self.data = out / "data" / "tokens.npy"
        self.checkpoints = out / "runs" / name / "checkpoints"
        self.memory: list[tuple[int, int]] = []
        self._lines: list[str] = []
        self._step = 0

    def start(self, largest_file: int | None = None) -> subprocess.Popen:
        """Starts the run, or goes on with it.

        Args:
            largest_file: bytes that no file may exceed, as on a full disk; None without a limit.
        """

        def limit() -> None:
            if largest_file is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

        self._lines, self._compiling = [], False
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), "--config", str(self._out / "soak.toml"),
             f"--run.name={self._name}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self._out,
            env=os.environ | {"PYTHONPATH": str(ROOT)}, preexec_fn=limit,
        )  # fmt: skip
        for target in (self._read, self._watch):
            threading.Thread(target=target, args=(self.process,), daemon=True).start()
        return self.process

    def wait_for(self, event: Event) -> float:
        """Waits for the moment of an event, or for the end; returns the time then."""
        give_up = time.monotonic() + _PATIENCE
        while time.monotonic() < give_up and self.process.poll() is None:
            if event.kind == "compile":
                # Wherever the run stands: it compiles when it starts.
                if self._compiling:
                    break
            elif self._step >= event.after and (
                event.kind in ("step", "data")
                or (event.kind == "save" and half_saved(self.checkpoints))
            ):
                break
            time.sleep(0.0005)
        return time.monotonic()

    def newest(self) -> int | None:
        """The step of the newest whole checkpoint."""
        return newest(self.checkpoints)

    def metrics_size(self) -> int:
        """Bytes of the metrics so far."""
        path = self.checkpoints.with_name("metrics.jsonl")
        return path.stat().st_size if path.is_file() else 0

    def output(self) -> str:
        """What the last process has printed."""
        return "".join(self._lines)

    def _read(self, process: subprocess.Popen) -> None:
        for line in process.stdout:
            self._lines.append(line)
            self._compiling = self._compiling or line.startswith("compiling")
            if line.startswith("step"):
                self._step = int(line.split()[1].partition("/")[0])

    def _watch(self, process: subprocess.Popen) -> None:
        while process.poll() is None:
            try:
                pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            except (OSError, IndexError):
                return
            if self._step and pages:
                self.memory.append((self._step, pages * os.sysconf("SC_PAGE_SIZE")))
            time.sleep(0.2)


def newest(folder: Path) -> int | None:
    """The step of the newest whole checkpoint in a folder."""
    if not folder.is_dir():
        return None
    return max((int(p.name) for p in folder.iterdir() if p.name.isdecimal()), default=None)


def half_saved(folder: Path) -> bool:
    """Whether a checkpoint lies there that is not whole yet."""
    try:
        return any(not path.name.isdecimal() for path in folder.iterdir())
    except OSError:
        return False
