"""Two runs at the same time: an uninterrupted one, and one that is ended again and again."""

import re
import shutil
import time
from pathlib import Path

from benchmarks.soak import report
from benchmarks.soak.events import Event, Rhythm, step_under_way, where_it_fell
from benchmarks.soak.process import NAMES, SoakedRun, make_data
from mtraining_jax.utils.errors import UserError

_TRIES = 5  # an audit takes milliseconds, and a signal can miss it


class SoakedPair:
    """Both runs, and what happened; `failures` are sentences about what is wrong.

    Args:
        out: folder with the data and a configuration for each run; everything is written there.
        steps: of each run.
        rhythm: of their audits and saves.
        minutes: time limit, after which both are killed and compared as they are.
    """

    def __init__(self, out: Path, steps: int, rhythm: Rhythm, minutes: float) -> None:
        self._out, self._steps, self._rhythm, self._minutes = out, steps, rhythm, minutes
        self._begin = time.monotonic()
        deadline = self._begin + 60 * minutes
        self._whole, self._stopped = (SoakedRun(out, name, rhythm, deadline) for name in NAMES)
        self._ends: list[report.Ended] = []
        self._in_time = True
        self.failures: list[str] = []

    def run(self, events: list[Event]) -> None:
        """Trains both, and applies the events to one of them, in order.

        Raises:
            UserError: if the uninterrupted run ended before its first checkpoint.
        """
        self._whole.start()
        try:
            # With the first checkpoint, all programs are compiled and cached.
            if not self._whole.wait_for_checkpoint():
                status, output = self._whole.wait(), "".join(self._whole.lines)
                raise UserError(
                    f"the run ended with status {status} before its first checkpoint:\n{output}"
                )
            for event in events:
                self._apply(event)
            begin = time.monotonic()
            self._stopped.start()
            status = self._stopped.wait()
            fell = "the end" if status == 0 else where_it_fell(self._stopped.lines, self._rhythm)
            self._add(None, fell, False, status, begin)
            self._check("the last start", self._stopped, status, (0,))
            self._check("the uninterrupted run", self._whole, self._whole.wait(), (0,))
        except TimeoutError:
            self._in_time = False
            self.failures.append(f"not done in {self._minutes:g} minutes")
        finally:
            self._whole.kill()
            self._stopped.kill()

    def _apply(self, event: Event) -> None:
        for _ in range(_TRIES):
            self._replace_data(event) if event.kind == "data" else self._end(event)
            if not self._ends[-1].missed:
                return
        self.failures.append(f"{event}: missed {_TRIES} times")

    def _end(self, event: Event) -> None:
        """Applies an event, and checks how the process ends."""
        run, begin = self._stopped, time.monotonic()
        run.start()
        if event.kind == "disk":
            run.wait_for(Event("step", 1, None, 0))
            run.limit_files()
        else:
            run.wait_for(event)
        saving = event.kind == "save" and run.half_saved()
        if event.signal is not None and run.process.poll() is None:
            begin = time.monotonic()
            run.process.send_signal(event.signal)
        status = run.wait()
        # A process may also finish before its moment comes.
        allowed = (event.status, 0) if event.signal is not None else (event.status,)
        self._check(str(event), run, status, allowed)
        under_way = step_under_way(run.lines)
        missed = status != 0 and {
            "audit": under_way is None or not self._rhythm.audits(under_way),
            "save": not saving,
            "compile": under_way is not None,
        }.get(event.kind, False)
        fell = where_it_fell(run.lines, self._rhythm) + (", while it saved" if saving else "")
        if event.kind == "disk" and under_way is not None:
            fell = f"after step {under_way - 1}"
        self._add(event, fell, missed, status, begin)

    def _replace_data(self, event: Event) -> None:
        """Kills the run, and checks that it does not resume with other data."""
        run, begin = self._stopped, time.monotonic()
        kept = run.data.with_name("kept.npy")
        shutil.copy(run.data, kept)
        run.start()
        run.wait_for(event)
        make_data(run.data, 100_000, seed=1)
        run.kill()
        run.wait()
        fell = where_it_fell(run.lines, self._rhythm)
        run.start()
        status = run.wait()
        kept.replace(run.data)
        self._check(str(event), run, status, (event.status,))
        self._add(event, f"{fell}; and the next start", False, status, begin)

    def _add(self, event: Event | None, fell: str, missed: bool, status: int, begin: float) -> None:
        run, now = self._stopped, time.monotonic()
        end = report.Ended(event, fell, missed, status, now - begin, run.newest(), run.half_saved())
        self._ends.append(end)
        print(f"[{now - self._begin:4.0f} s] {end.row(len(self._ends))}", flush=True)

    def _check(self, what: str, run: SoakedRun, status: int, allowed: tuple[int, ...]) -> None:
        text = "".join(run.lines)
        if status not in allowed:
            self.failures.append(f"{what} ended with status {status}\n{text[-1500:]}")
        found = re.search("Traceback|DEBUG:", text)
        if found is not None:
            self.failures.append(f"{what} printed a traceback\n{text[found.start() :][:4000]}")

    def report(self) -> list[str]:
        """Compares both runs, adds to `failures`, and returns lines of Markdown."""
        runs, lines = self._out / "runs", []
        parts = [report.differences(runs, self._in_time), (report.stop_times(self._ends), [])]
        parts.append(report.repeats(runs))
        if self._in_time:
            parts.append(report.leftovers(runs))
        parts.append(report.memory(self._whole, self._steps))
        for found, wrong in parts:
            lines += found
            self.failures += wrong
        wrong = "\n".join(["WRONG:", *(f"- {x}" for x in self.failures)])
        return [
            f"{self._steps} steps in each run, {time.monotonic() - self._begin:.0f} s; saved every "
            f"{self._rhythm.save} steps, audited every {self._rhythm.audit}.",
            "", *report.what_ran(self._whole.lines), "", *report.table(self._ends), "", *lines,
            "", wrong if self.failures else "All checks passed.",
        ]  # fmt: skip
