"""The process of one arm at one length: `python -m benchmarks.step.peers.measure JOB`."""

import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks import workers
from benchmarks.step.peers.arms import ARMS, MODELS

OUT_OF_MEMORY = "out of memory"
_SIGNS = "out of memory", "resource_exhausted"  # in errors of torch, JAX and CUDA


def main() -> None:
    """Compiles, waits for its turn, takes steps and sends a row."""
    job = json.loads(sys.argv[1])
    if job["attempt"] or job["compile"]:
        # Returns memory at once: compiling tries kernels, and this process may wait for its turn.
        os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
    try:
        step = prepare(job)
    except ImportError as missing:
        workers.skip(str(missing))
        return
    except Exception as error:  # of another project: recorded, not raised
        step = error
    if not workers.my_turn() or job["compile"]:
        return
    workers.send(measure(job, step))
    sys.stdout.flush()
    os._exit(0)  # a step that has not ended is abandoned


def prepare(job: dict[str, Any]) -> Any:
    """Returns the `Step` of an arm; ImportError if something is missing."""
    arm = ARMS[job["arm"]]
    module = importlib.import_module(f"benchmarks.step.peers.{arm.module}")
    return module.Step(MODELS[job["model"]], job["tokens"], arm.variant)


def measure(job: dict[str, Any], step: Any) -> dict[str, Any]:
    """Takes steps and returns a row of results; `step` is the exception if there is none."""
    row = {name: job[name] for name in ("model", "arm", "tokens", "attempt")}
    row |= {"date": time.strftime("%Y-%m-%d"), "used": _used_memory()}
    if isinstance(step, Exception):
        return row | {"error": f"{_description(step)} before its first step"}
    try:
        row |= step.load()
        row |= _attempted(step, job["limit"]) if job["attempt"] else _measured(step, job["steps"])
    except Exception as error:
        row["error"] = _description(error)
    return row


def _measured(step: Any, steps: int) -> dict[str, Any]:
    losses, seconds = step.run(1 + steps)  # the first one warms up
    found = {"losses": losses, "seconds": statistics.median(seconds[1:]), "steps": steps}
    return found | {"spread": [min(seconds[1:]), max(seconds[1:])]} | _sizes(step)


def _attempted(step: Any, limit: float) -> dict[str, Any]:
    """One step, abandoned after `limit` seconds."""
    future = ThreadPoolExecutor(1).submit(step.run, 1)
    try:
        losses, seconds = future.result(limit)
    except TimeoutError:
        return {"unfinished": limit, "peak": step.peak()}
    return {"losses": losses, "seconds": seconds[0], "steps": 1} | _sizes(step)


def _sizes(step: Any) -> dict[str, Any]:
    return {"peak": step.peak(), "density": step.density()}


def _description(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    if any(sign in text.lower() for sign in _SIGNS):
        return OUT_OF_MEMORY
    return " ".join(text.split())[:300]


def _used_memory() -> int | None:
    """Bytes of the GPU that processes use now; None without a GPU."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return int(found.split()[0]) * 2**20


if __name__ == "__main__":
    main()
