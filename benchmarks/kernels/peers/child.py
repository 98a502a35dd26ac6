"""The side of a baseline in torch: a worker that has a row of the table for each problem."""

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks import workers

Prepare = Callable[[Any, dict[str, np.ndarray]], tuple[str, Sequence[Callable[[], dict]]]]


class MissingError(Exception):
    """Why a baseline cannot run here, in one sentence."""


def serve(prepare: Prepare) -> None:
    """Runs a baseline on the file named by the command line.

    Args:
        prepare: called with torch and the arrays of the file; compiles, and returns versions and a
            function for each row that returns times by name. Raises `MissingError` if something is
            not installed.
    """
    with np.load(sys.argv[1]) as file:
        problem = dict(file)
    rows = json.loads(str(problem.pop("rows")))
    try:
        import torch

        if not torch.cuda.is_available():
            raise MissingError("torch sees no CUDA device")
        versions, measures = prepare(torch, problem)
    except (ImportError, MissingError) as error:
        workers.skip(str(error))
        return
    if not workers.my_turn(f"torch {torch.__version__}, {versions}"):
        return
    for row, measure in zip(rows, measures, strict=True):
        row |= measure()
        if "tiles" in row:
            done = {name: row.pop(name) for name in ("tiles", "bars")}
            if done != row["work"]:
                name = f"{row['who']} on mask {row['mask']}"
                sys.exit(f"error: {name} executes {done} instead of {row['work']}")
        workers.send(row | {"total": row["forward"] + row["backward"]})


def median_ms(torch: Any, run: Callable[[], Any], repeats: int) -> float:
    """Median device time of `run`, after two warm-up calls."""
    for _ in range(2):
        run()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def normal(torch: Any, *shape: int) -> Any:
    """A random tensor in bf16."""
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")
