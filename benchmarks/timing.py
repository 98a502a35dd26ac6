"""Times of programs on a device."""

import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

_BURST_SECONDS = 0.02
_START = time.perf_counter()


def log(text: str) -> None:
    """Prints a line of progress to stderr, with the seconds since the start."""
    print(f"[{time.perf_counter() - _START:6.1f} s] {text}", file=sys.stderr, flush=True)


def median_ms(run: Callable[[], Any], repeats: int = 10, burst: int | None = None) -> float:
    """Median time of `run` in ms, after a warm-up.

    Each repeat queues `burst` runs and waits for the last one. By default these are enough to keep
    the device busy for a while, so that the host's time for short programs stays hidden.
    """
    jax.block_until_ready(run())
    once = _seconds(run, 1)
    burst = burst or min(50, math.ceil(_BURST_SECONDS / once))
    found = [once] if burst == 1 else []  # long enough to count as a repeat
    while len(found) < repeats:
        found.append(_seconds(run, burst))
    return 1e3 * statistics.median(found)


def _seconds(run: Callable[[], Any], burst: int) -> float:
    start = time.perf_counter()
    for _ in range(burst):
        result = run()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / burst
