"""Where the wall time of a run goes, across its restarts."""

import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mtraining_jax.callbacks import Record
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.text import counted

# Work of a run, by the name in metrics; "other" is the rest, such as metrics and traces.
KINDS: tuple[str, ...] = (
    "steps", "stalled", "data", "compile", "checkpoint", "eval", "starting", "other",
)  # fmt: skip
_NEWEST = 100  # steps of a statistic
_WARM_UP = 2  # steps that statistics skip: they load kernels and connect devices
_STALLED = 2.0  # a step that takes so many times the median is stalled for the rest of its time


class Goodput:
    """Sums up the wall time of a run by kind of work, from the creation of this object.

    After a restart, time since the checkpoint was saved counts as "starting": steps that are
    repeated, time without any process, and the start of the new ones.

    Attributes:
        step_timing: `step_deviation`, standard deviation over mean of the newest steps, and
            `host_wait`, mean seconds of a step in which devices waited for this process.
    """

    def __init__(self) -> None:
        self._begin, self._clock = time.time(), time.perf_counter()
        self._seconds = dict.fromkeys(KINDS[:-1], 0.0)  # "other" is the rest
        self._earlier = 0.0  # wall time before this start
        self._restarts = 0
        self._count = 0
        self._newest: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_NEWEST))
        self._waits: deque[float] = deque(maxlen=_NEWEST)
        self.step_timing = {"step_deviation": 0.0, "host_wait": 0.0}

    def state(self, *, finished: bool) -> dict[str, Any]:
        """What a checkpoint keeps; the time after a finished run is not part of a longer one."""
        saved = None if finished else time.time()
        return {
            "seconds": dict(self._seconds),
            "wall": self._wall(),
            "saved": saved,
            "restarts": self._restarts,
        }

    def go_to(self, state: Mapping[str, Any] | None) -> None:
        """Continues from the state of a checkpoint, if it has one.

        Raises:
            UserError: if the state is not readable.
        """
        if state is None:
            return
        try:
            for kind in self._seconds:
                self._seconds[kind] += float(state["seconds"][kind])
            self._restarts = int(state["restarts"]) + 1
            saved = self._begin if state["saved"] is None else float(state["saved"])
            self._earlier = float(state["wall"]) + max(0.0, self._begin - saved)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError("the saved wall times of the run are not readable") from error
        self.add("starting", max(0.0, self._begin - saved))

    def started(self) -> None:
        """Must be called once, when the parts of the run are built."""
        self.add("starting", time.perf_counter() - self._clock)

    def add(self, kind: str, seconds: float) -> None:
        """Adds the time of other work than steps."""
        self._seconds[kind] += seconds

    def step(self, program: str, seconds: float, host_wait: float, data: float) -> None:
        """Adds a step.

        Args:
            program: its name; others take other times.
            seconds: its time, from the end of the step before it.
            host_wait: time in which devices waited for this process to begin it.
            data: the part of this in which the process waited for data.
        """
        newest = self._newest[program]
        usual = float(np.median(newest)) if len(newest) > _WARM_UP else seconds
        stalled = seconds - data - usual if seconds - data > _STALLED * usual else 0.0
        for kind, part in (("data", data), ("stalled", stalled)):
            self.add(kind, part)
        self.add("steps", seconds - data - stalled)
        self._count += 1
        if self._count > _WARM_UP:
            newest.append(seconds - data)
            self._waits.append(host_wait)
            most = max(self._newest.values(), key=len)
            deviation, wait = np.std(most) / np.mean(most), np.mean(self._waits)
            self.step_timing = {"step_deviation": float(deviation), "host_wait": float(wait)}

    def record(self, process_timings: Sequence[Mapping[str, float]]) -> Record:
        """Entries of the newest step's record; `process_timings` has the `step_timing` of each."""
        wall = self._wall()
        seconds = self._seconds | {"other": max(0.0, wall - sum(self._seconds.values()))}
        record: Record = {f"time_share/{kind}": seconds[kind] / wall for kind in KINDS}
        for name in self.step_timing:
            record[f"{name}_by_process"] = [x.get(name, 0.0) for x in process_timings]
        return record | {"wall_time": wall, "restarts": self._restarts}

    def _wall(self) -> float:
        return self._earlier + time.perf_counter() - self._clock


def time_text(record: Record) -> str:
    """Where the time went until a record: "91.2% in steps, 5.1% starting, of 900 s since ..."."""
    shares = {kind: record[f"time_share/{kind}"] for kind in KINDS}
    steps = shares.pop("steps")
    rest = sorted(((x, kind) for kind, x in shares.items() if x > 5e-4), reverse=True)
    parts = [f"{steps:.1%} in steps", *(f"{x:.1%} {kind}" for x, kind in rest)]
    text = f"{', '.join(parts)}, of {record['wall_time']:,.0f} s since the start"
    number = record["restarts"]
    return f"{text}, with {counted(number, 'restart')}" if number else text


def processes_text(record: Record) -> str | None:
    """How step times vary, and which process devices wait for; None for a single process."""
    deviations, waits = record["step_deviation_by_process"], record["host_wait_by_process"]
    if len(waits) == 1:
        return None
    last = int(np.argmax(waits))
    return (
        f"step times vary by {max(deviations):.1%}; devices wait {waits[last]:.3f} s per step for "
        f"process {last}, {np.median(waits):.3f} s for the median one"
    )
