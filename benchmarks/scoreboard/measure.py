"""The process of one package on one case: `python -m benchmarks.scoreboard.measure JOB`."""

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks import workers
from benchmarks.peers.measure import errors, milliseconds
from benchmarks.peers.own import Own
from benchmarks.peers.problems import INPUTS
from benchmarks.report import versions
from benchmarks.scoreboard.cases import Case, folder_of
from benchmarks.scoreboard.packages import PACKAGES, Attention

Job = dict[str, Any]


class Passes(Own):
    """The forward pass, and both passes, of a package on a case, each compiled as one program."""

    def __init__(self, case: Case, job: Job) -> None:
        package, self.problem = PACKAGES[job["kernels"]], case.problem
        self.folder = folder_of(Path(job["scratch"]), case)
        self._distributions = "jax", "jaxlib", *package.distributions
        assert package.attention is not None
        attend, bits = package.attention(case, job["backend"]), case.bits(job["seed"])
        self._bits = None if bits is None else jnp.asarray(bits)
        inputs = [jax.ShapeDtypeStruct(self.problem.shape(x), jnp.bfloat16) for x in INPUTS]
        with ThreadPoolExecutor() as pool:
            forward = jax.jit(attend).lower(*inputs[:3], self._bits)
            compiling = pool.submit(forward.compile)
            self._both = jax.jit(with_gradients(attend)).lower(*inputs, self._bits).compile()
            self._forward = compiling.result()

    def load(self) -> None:
        super().load()
        self.about["versions"] = versions(*self._distributions)

    def output(self) -> Array:
        return self._forward(*self._inputs[:3], self._bits)

    def total(self) -> tuple[Array, ...]:
        return self._both(*self._inputs, self._bits)


def with_gradients(attend: Attention) -> Callable[..., tuple[Array, ...]]:
    """Both passes in one program: out, dq, dk, dv of (q, k, v, dout, bits)."""

    def both(q: Array, k: Array, v: Array, dout: Array, bits: Array | None) -> tuple[Array, ...]:
        out, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, bits), q, k, v)
        return out, *vjp(dout)

    return both


def measure(passes: Passes, repeats: int, send: Callable[[Job], None]) -> None:
    """Sends every value once it is known, so that an aborted process keeps what it has."""
    before = passes.memory()[0]
    results = passes.wait(passes.total())
    send({"memory": passes.memory()[1] - before})
    again = [[passes.same(*x) for x in zip(results, passes.total(), strict=True)] for _ in "ab"]
    repeated = [all(x) for x in zip(*again, strict=True)]
    send({"out_repeats": repeated[0], "gradients_repeat": all(repeated[1:])})
    send({"out": worst([errors(passes, "out", x) for x in (results[0], passes.output())])})
    gradients = zip(("dq", "dk", "dv"), results[1:], strict=True)
    send({"gradients": worst([errors(passes, name, x) for name, x in gradients])})
    del results
    send({"forward": milliseconds(passes.output, passes.wait, repeats)})
    send({"total": milliseconds(passes.total, passes.wait, repeats)})


def worst(found: Sequence[tuple[float, float]]) -> float:
    """The largest relative error; NaN if one is."""
    return max((x for _, x in found), key=lambda x: (math.isnan(x), x))


def run(job: Job, turn: Callable[[], bool], send: Callable[[Job], None]) -> None:
    """Compiles, waits for its turn, measures, and sends each value once it is known."""
    case = Case.parse(job["problem"])
    known = {name: job[name] for name in ("problem", "kernels")}
    known["date"] = time.strftime("%Y-%m-%d")
    failure = kernels = None
    try:
        kernels = Passes(case, job)
    except Exception as error:  # another project's: recorded, not raised
        failure = error
    if not turn():
        return
    try:
        if kernels is not None:
            kernels.load()
            known |= kernels.about
            measure(kernels, job["repeats"], lambda row: send(known | row))
    except Exception as error:
        failure = error
    if failure is not None:
        text = str(failure).strip().splitlines() or [""]
        send(known | {"error": f"{type(failure).__name__}: {text[0]}"[:300]})


if __name__ == "__main__":
    run(json.loads(sys.argv[1]), workers.my_turn, workers.send)
