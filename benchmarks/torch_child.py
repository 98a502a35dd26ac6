"""The child's side of `torch_peer.py`: attention in torch, timed in a process of its own.

A child reads a file of arrays, compiles, prints {"ready": versions} or {"missing": why}, and waits
for a line on standard input; the device must then be idle. Then it prints one line of JSON for each
row of the table: times in ms by name, or {"failed": why}.
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
    """Why a peer cannot run here, in one sentence."""


def serve(prepare: Prepare) -> None:
    """Runs a peer on the file that the command line names.

    Args:
        prepare: called with torch and the file's arrays; compiles, and returns versions and a
            function for each row. Raises `MissingError` if something is not there.
    """
    with np.load(sys.argv[1]) as file:
        problem = dict(file)
    told = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # of libraries that print what they miss
        try:
            import torch

            if not torch.cuda.is_available():
                raise MissingError("torch sees no CUDA device")
            versions, rows = prepare(torch, problem)
        except (ImportError, MissingError) as error:
            _tell(told, missing=str(error))
            return
        _tell(told, ready=f"torch {torch.__version__}, {versions}")
        sys.stdin.readline()
        for row in rows:
            try:
                values = row()
            except torch.OutOfMemoryError as error:
                values = {"failed": str(error).splitlines()[0]}
            _tell(told, **values)


def median_ms(torch: Any, run: Callable[[], Any], repeats: int) -> float:
    """Median time of `run` on the device, after a warm-up."""
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


def _tell(file: Any, **values: Any) -> None:
    print(json.dumps(values), file=file, flush=True)
