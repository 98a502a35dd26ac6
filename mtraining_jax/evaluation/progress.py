"""Progress of an evaluation: a bar on a terminal, lines elsewhere."""

from types import TracebackType
from typing import Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mtraining_jax.evaluation.results import Line
from mtraining_jax.evaluation.tasks import Task
from mtraining_jax.utils.text import counted


class Watch:
    """Shows the progress of an evaluation; a `Watcher` and a context manager.

    After each task and length, it prints the mean scores of the samples of this call.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._cell = ""
        self._values: dict[str, list[float]] = {}
        self.done = self.total = 0

    def start(self, total: int, done: int) -> None:
        self._tell_cell()
        self.total, self.done = self.total + total, self.done + done
        if done:
            self._print(f"{done} of {total} samples are already evaluated")
        if self._console.is_terminal and self._bar is None:
            self._bar = Progress(
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}"),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("evaluate", total=0, status="")
            self._bar.start()
        self._update()

    def at(self, model: str, task: Task, length: int) -> None:
        self._tell_cell()
        self._cell = f"{task.name}, {length} tokens"
        self._update()

    def add(self, line: Line) -> None:
        self.done += 1
        value = line["score"] if "score" in line else line["loss"]
        self._values.setdefault(line["attention"], []).append(value)
        self._update()

    def stop(self) -> None:
        self._tell_cell()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _tell_cell(self) -> None:
        if self._values:
            count = max(len(values) for values in self._values.values())
            self._print(f"{self._cell}: {self._means()} ({counted(count, 'sample')})")
        self._values = {}

    def _means(self) -> str:
        return ", ".join(f"{name} {np.mean(x):.3f}" for name, x in self._values.items())

    def _update(self) -> None:
        if self._bar is not None:
            self._bar.update(
                self._task,
                total=self.total,
                completed=self.done,
                status=f"{self._cell}  {self._means()}",
            )

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)
