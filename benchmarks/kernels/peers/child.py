"""The child's side of `peer.py`: times attention in torch, in its own process.

A child reads a file of arrays, compiles, prints {"ready": versions} or {"missing": reason}, and
waits for a line on standard input, during which the device must be idle. Then it prints one line of
JSON for each row of the table: times in ms by name, or {"failed": reason}.
"""

import contextlib
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

Prepare = Callable[[Any, dict[str, np.ndarray]], tuple[str, Iterable[Callable[[], dict]]]]


class MissingError(Exception):
    """Why a baseline cannot run here, in one sentence."""


def serve(prepare: Prepare) -> None:
    """Runs a baseline on the file named by the command line.

    Args:
        prepare: called with torch and the arrays of the file; compiles, and returns versions and a
            function for each row. Raises `MissingError` if something is not installed.
    """
    with np.load(sys.argv[1]) as file:
        problem = dict(file)
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # some libraries print what they lack
        try:
            import torch

            if not torch.cuda.is_available():
                raise MissingError("torch sees no CUDA device")
            versions, rows = prepare(torch, problem)
        except (ImportError, MissingError) as error:
            _send(out, missing=str(error))
            return
        _send(out, ready=f"torch {torch.__version__}, {versions}")
        sys.stdin.readline()
        for row in rows:
            try:
                values = row()
            except torch.OutOfMemoryError as error:
                values = {"failed": str(error).splitlines()[0]}
            _send(out, **values)


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


def _send(file: Any, **values: Any) -> None:
    print(json.dumps(values), file=file, flush=True)
