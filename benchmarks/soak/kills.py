"""Ends one of two CPU processes at random moments, and checks how the other ends and resumes.

    python -m benchmarks.soak.kills --out /tmp/kills --report kills.md  # about 40 minutes
    python -m benchmarks.soak.kills --out /tmp/kills --kills 2 -- --parallel.replicas=2

Arguments after `--` go to train.py. Each start of the run is ended by SIGKILL of one process, or
by SIGTERM to both (`--preemptions`), at a random moment: every second one before the first step,
the others in the ten seconds after it. Both processes must end within a minute (30 s after
SIGTERM), with one sentence, and the restarts must repeat an uninterrupted run bit by bit. The exit
status is 1 if something is wrong.
"""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.options import make_parser
from benchmarks.report import Page, setting, table_head, table_line
from benchmarks.soak.__main__ import CONFIG, CPU
from benchmarks.soak.events import Rhythm, logged_step, where_it_fell
from benchmarks.soak.process import NAMES, make_data
from benchmarks.soak.report import differences
from benchmarks.workers import ROOT
from mtraining_jax.training.checkpoint import newest_step

_SAVE, _EVALUATE = 40, 25  # steps between them
_LIMITS, _HANGS = {signal.SIGKILL: 60, signal.SIGTERM: 30}, 120  # seconds to the end
_RHYTHM = Rhythm(10**9, _SAVE)  # no audits
_COLUMNS = (
    "start", "signal", "at second", "where it fell", "statuses", "seconds to the end",
    "newest checkpoint", "sentence",
)  # fmt: skip
_GOOD = "All ended in time with one sentence, and all steps are bit-identical."


class _Run:
    """Two processes of one run, which write their output into files."""

    def __init__(self, out: Path, name: str, options: list[str], start: int = 0) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.folder = out / "runs" / name
        self._logs = [out / f"{name}-{start}-{number}.log" for number in range(2)]
        self.begin, self.processes = time.monotonic(), []
        for number, log in enumerate(self._logs):
            command = [
                sys.executable, str(ROOT / "train.py"), f"--config={out}/{name}.toml",
                f"--run.name={name}", f"--distributed.coordinator=127.0.0.1:{port}",
                "--distributed.num_processes=2", f"--distributed.process_id={number}",
                "--distributed.timeout_seconds=30", f"--eval.interval={_EVALUATE}",
                f'--eval.data.paths=["{out}/validation.npy"]', *options,
            ]  # fmt: skip
            with log.open("w") as file:
                process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=out)
            self.processes.append(process)

    def lines(self, number: int) -> list[str]:
        return self._logs[number].read_text(errors="replace").splitlines(keepends=True)

    def running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def first_step(self, limit: float = float("inf")) -> float:
        """Waits for the first step, for the end, or `limit` seconds; returns the seconds."""
        end = time.monotonic() + limit
        while self.running() and time.monotonic() < end:
            if any(map(logged_step, self.lines(0))):
                break
            time.sleep(0.05)
        return time.monotonic() - self.begin

    def statuses(self, limit: float | None = None) -> list[int | None]:
        """Waits for both processes, at most `limit` seconds; None for one that still runs."""
        end = time.monotonic() + (limit or float("inf"))
        while self.running() and time.monotonic() < end:
            time.sleep(0.05)
        return [process.poll() for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def _ended(run: _Run, by: signal.Signals, to: list[int]) -> tuple[list[str], str]:
    """Sends a signal; returns cells of its row and what is wrong."""
    seconds = time.monotonic() - run.begin
    saving = [x for x in (run.folder / "checkpoints").glob("*") if not x.name.isdecimal()]
    sent = time.monotonic()
    for number in to:
        run.processes[number].send_signal(by)  # nothing happens if it has ended
    statuses = run.statuses(_HANGS)
    took = time.monotonic() - sent
    run.kill()
    fell = where_it_fell(run.lines(0), _RHYTHM) + ", while it saved" * bool(saving)
    expected = {75, -by, 0} | ({2} if fell == "its start" else set())
    wrong = [] if took <= _LIMITS[by] and set(statuses) <= expected else ["status or time"]
    said = run.lines(0 if len(to) > 1 else 1 - to[0])
    sentences = [line for line in said if line.startswith(("stopped: ", "error: "))]
    if set(statuses) & {75, 2} and len(sentences) != 1:
        wrong.append(f"{len(sentences)} sentences")
    if any("Traceback" in line for number in range(2) for line in run.lines(number)):
        wrong.append("a traceback")
    saved = newest_step(run.folder / "checkpoints")
    cells = [
        f"{by.name} to {' and '.join(map(str, to))}", f"{seconds:.1f}", fell,
        ", ".join(map(str, statuses)), f"{took:.1f}", "" if saved is None else f"step {saved}",
        "".join(sentences).partition("; ")[0].strip(),
    ]  # fmt: skip
    return cells, "; ".join(wrong)


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder to create")
    parser.add_argument("--report", type=Path, help="Markdown file; default REPORT.md in --out")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--preemptions", type=int, default=5, help="SIGTERM to both processes")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0, help="of moments and processes")
    parser.add_argument("options", nargs="*", help="of train.py")
    args = parser.parse_args(argv)
    out = args.out.absolute()
    out.mkdir(parents=True)
    make_data(out / "tokens.npy", 500_000, seed=0)
    make_data(out / "validation.npy", 20_000, seed=1)
    for name in NAMES:
        text = CONFIG.format(
            steps=args.steps, save=_SAVE, audit=0, kind="sampled_rows", out=out,
            data=out / "tokens.npy", devices=2, on_cpu="cpu_devices = 1", **CPU,
        )  # fmt: skip
        (out / f"{name}.toml").write_text(text)
    page, rng, wrong = Page(args.report or out / "REPORT.md"), np.random.default_rng(args.seed), []
    whole = _Run(out, NAMES[0], args.options)
    start = whole.first_step()
    if any(whole.statuses()):
        print(*whole.lines(0), *whole.lines(1), sep="", file=sys.stderr)
        return 1
    page.add(
        f"{setting()}; {args.steps} steps; saved every {_SAVE}, evaluated"
        f" every {_EVALUATE} steps; first step after {start:.0f} s", "",
        *table_head(_COLUMNS),
    )  # fmt: skip
    signals = [signal.SIGKILL] * args.kills + [signal.SIGTERM] * args.preemptions
    for number, by in enumerate(rng.permutation(signals), 1):
        by, draw = signal.Signals(by), rng.random()
        to = [0, 1] if by == signal.SIGTERM else [int(rng.integers(2))]
        run = _Run(out, NAMES[1], args.options, number)
        try:
            if number % 2:
                run.first_step(draw * start)
            else:
                run.first_step()
                time.sleep(10 * draw)
            cells, problem = _ended(run, by, to)
        finally:
            run.kill()
        page.add(table_line([str(number), *cells]))
        wrong += [f"start {number}: {problem}"] if problem else []
    last = _Run(out, NAMES[1], args.options)
    wrong += [f"the last start ended with {last.statuses()}"] if any(last.statuses()) else []
    lines, different = differences(out / "runs", complete=True)
    wrong += different
    page.add("", *lines, "", *(f"- WRONG: {x}" for x in wrong), *[_GOOD] * (not wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
