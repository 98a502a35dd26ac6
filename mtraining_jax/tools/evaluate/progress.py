"""Progress of an evaluation: a bar on a terminal, lines elsewhere."""

from typing import Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mtraining_jax.tools.evaluate.results import Line
from mtraining_jax.utils.text import counted


class Watch:
    """Shows the progress of an evaluation; a context manager.

    After each task and length, it prints the mean scores of the samples of this call.
    """

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._row = self._bar.add_task("", total=0)
        self._cell = ""
        self._values: dict[str, list[float]] = {}
        self.done = self.total = 0

    def start(self, total: int, done: int, where: str) -> None:
        """Adds the number of planned lines, and of those that exist already; prints their place."""
        self.at("")
        self.total, self.done = self.total + total, self.done + done
        if done:
            self._print(f"{done} of {total} samples are already evaluated for this model: {where}")
        self._bar.start()
        self._update()

    def at(self, cell: str) -> None:
        """Sets the task and length of the next lines."""
        if cell != self._cell:
            if self._values:
                count = max(map(len, self._values.values()))
                self._print(f"{self._cell}: {self._means()} ({counted(count, 'sample')})")
            self._values, self._cell = {}, cell
            self._update()

    def add(self, line: Line) -> None:
        self.done += 1
        value = line["score"] if "score" in line else line["loss"]
        self._values.setdefault(line["attention"], []).append(value)
        self._update()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.at("")
        self._bar.stop()

    def _means(self) -> str:
        return ", ".join(f"{name} {np.mean(x):.3f}" for name, x in self._values.items())

    def _update(self) -> None:
        status = f"{self._cell}  {self._means()}"
        self._bar.update(self._row, total=self.total, completed=self.done, description=status)

    def _print(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)
