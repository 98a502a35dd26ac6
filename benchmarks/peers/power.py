"""Power and clock of the GPU while calls are queued for seconds. Needs no JAX."""

import os
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

_SETTLE = 0.3  # of the seconds: samples before are not counted


def sustained(run: Callable[[], Any], wait: Callable[[Any], Any], seconds: float) -> list[float]:
    """Returns ms of a call, watts and MHz: means while calls are queued for `seconds`.

    A thread would share the interpreter with the calls, so nvidia-smi writes its samples to a pipe,
    which is read later.

    Raises:
        FileNotFoundError: nvidia-smi is missing.
    """
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["--query-gpu=power.draw.instant,clocks.sm", "--format=csv,noheader,nounits"]
    command = ["nvidia-smi", "-i", device, *query, "-lms", "50"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sampler:
        assert sampler.stdout is not None
        try:
            sampler.stdout.readline()  # it takes longer to start than to sample
            start, calls = time.perf_counter(), 0
            while time.perf_counter() - start < seconds:
                results = [run() for _ in range(3)]
                wait(results[-1])
                calls += len(results)
            passed = time.perf_counter() - start
        finally:
            sampler.terminate()
        samples = [[float(x) for x in line.split(",")] for line in sampler.stdout if "," in line]
    counted = samples[int(_SETTLE * len(samples)) : -1]  # the last one may be cut off
    return [1e3 * passed / calls, *map(statistics.mean, zip(*counted, strict=True))]
