"""What the process of every kernel does: times, errors, bits and memory of one problem.

An object of a class for some kernels (`benchmarks.peers.own`, `benchmarks.peers.others`) has
`problem`, `folder` (of the inputs), `masked` (False if the diagonal's blocks are computed in full)
and `about` (device and versions, for the results), and these functions:

    Class(problem, job)         prepares without the GPU; ImportError if something is missing
    load()                      reads the inputs
    build() -> index            what both passes read in addition to inputs, None if nothing
    forward(index) -> saved     the output, and then what the backward pass needs
    backward(saved) -> dq, dk, dv
    total()                     all three
    wait(x) -> x                returns once x is computed
    same(x, y) -> bool          whether the bits are equal
    block(x, batch, head, rows) float32 [rows, D], a part of x
    memory() -> int, int        bytes in use, now and at most
"""

import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import workers
from benchmarks.kernels.masks import BLOCK
from benchmarks.peers.power import sustained
from benchmarks.peers.problems import Problem, samples

_BURST_SECONDS = 0.02
_SECONDS = 3.0  # of one measurement


def milliseconds(run: Callable[[], Any], wait: Callable[[Any], Any], repeats: int) -> float:
    """Returns the median time of a run in ms; without JAX, which processes of torch lack."""

    def seconds(runs: int) -> float:
        start = time.perf_counter()
        for _ in range(runs):
            result = run()
        wait(result)
        return (time.perf_counter() - start) / runs

    wait(run())
    runs = min(50, math.ceil(_BURST_SECONDS / seconds(1)))
    end, found = time.perf_counter() + _SECONDS, [seconds(runs)]
    while len(found) < repeats and time.perf_counter() < end:
        found.append(seconds(runs))
    return 1e3 * statistics.median(found)


def errors(kernels: Any, name: str, array: Any) -> tuple[float, float]:
    """Largest error of the samples, and norm of errors over that of the exact values."""
    found = [
        kernels.block(array, batch, head, slice(block * BLOCK, (block + 1) * BLOCK))
        for batch, head, block in samples(kernels.problem, name)
    ]
    exact = np.load(kernels.folder / f"exact-{kernels.masked}.npz")[name]
    wrong = np.stack(found) - exact
    return float(np.abs(wrong).max()), float(np.linalg.norm(wrong) / np.linalg.norm(exact))


def measure(
    kernels: Any, repeats: int, send: Callable[[dict[str, Any]], None], queued: float = 0
) -> None:
    """Sends every value once it is known, so that an aborted process keeps what it has.

    With `queued`, each pass is also called for so many seconds, with power and clock.
    """

    def timed(name: str, run: Callable[[], Any]) -> None:
        send({name: milliseconds(run, kernels.wait, repeats)})
        if queued and name in ("forward", "backward"):
            send({f"{name}_queued": sustained(run, kernels.wait, queued)})

    before = kernels.memory()[0]
    index = kernels.build()
    saved = kernels.wait(kernels.forward(index))
    repeated = [kernels.same(saved[0], kernels.forward(index)[0]) for _ in range(2)]
    send({"out": errors(kernels, "out", saved[0]), "forward_repeats": all(repeated)})
    timed("forward", lambda: kernels.forward(index))
    if index is not None:
        timed("build", kernels.build)
    grads = kernels.wait(kernels.backward(saved))
    send({"memory": kernels.memory()[1] - before})
    again = [kernels.backward(saved) for _ in range(2)]
    repeated = [all(map(kernels.same, grads, each)) for each in again]
    send(
        {name: errors(kernels, name, x) for name, x in zip(("dq", "dk", "dv"), grads, strict=True)}
    )
    send({"backward_repeats": all(repeated)})
    del grads, again
    timed("backward", lambda: kernels.backward(saved))
    timed("total", kernels.total)


def serve(kinds: Callable[[str], Callable[..., Any]]) -> None:
    """Runs a worker: prepares, waits for its turn, loads inputs and measures."""
    job = json.loads(sys.argv[1])
    problem = Problem.parse(job["problem"])
    known = {name: job[name] for name in ("problem", "kernels")} | problem.figures(job["seed"])
    try:
        kernels = kinds(job["kernels"])(problem, job)
    except ImportError as missing:
        workers.skip(str(missing))
        return
    if not workers.my_turn():
        return
    try:
        kernels.load()
        known |= {"date": time.strftime("%Y-%m-%d")} | kernels.about
        measure(kernels, job["repeats"], lambda row: workers.send(known | row), job["queued"])
    except Exception as failure:  # of another project's kernels: recorded, not raised
        text = str(failure).strip().splitlines() or [""]
        workers.send(known | {"error": f"{type(failure).__name__}: {text[0]}"[:300]})
