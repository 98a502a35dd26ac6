"""Problems of the ring benchmark: compiled ahead of time, then timed mask by mask."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from benchmarks.kernels.masks import BLOCK, slash_mask
from benchmarks.kernels.programs import index_like
from benchmarks.ring.programs import Problem, RingPrograms
from benchmarks.timing import median_ms
from mtraining_jax.parallel.compiler import ring_compiler_options
from pallas_kernels.index import DenseIndex

PASSES = 3.5  # FLOP of forward and backward over those of forward, as published rates count them
MEASURES = ("select", "silent")


@dataclasses.dataclass
class Row:
    """A row of the table; times are medians in ms, None where nothing was measured.

    Attributes:
        problem: what was computed.
        mask: "A", "B" or "D" (dense causal).
        flops: executed in a forward pass, over all ranks.
        forward: output.
        both: output and gradients in one program, for a given index.
        step: selection and then `both`.
        select: selection over all ranks.
        silent: `both` on all ranks without communication.
        temp: bytes per GPU beyond arguments and results of `both`, from the compiler.
    """

    problem: Problem
    mask: str
    flops: float
    forward: float
    both: float
    step: float | None = None
    select: float | None = None
    silent: float | None = None
    temp: int | None = None

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Row":
        """The row that `dataclasses.asdict` turned into JSON."""
        return cls(**values | {"problem": Problem(**values["problem"])})

    @property
    def backward(self) -> float:
        """Time of the gradients: `both` minus `forward`."""
        return self.both - self.forward

    def rate(self, ms: float, passes: float = PASSES) -> float:
        """Executed TFLOP/s per GPU."""
        return passes * self.flops / self.problem.gpus / ms / 1e9


class Case:
    """Compiled programs of one problem.

    Args:
        problem: what to compute.
        devices: at least as many as the problem has ranks.
        measures: which of `MEASURES` to compile and time in addition to forward and both.
    """

    def __init__(
        self, problem: Problem, devices: list[jax.Device], measures: Sequence[str] = MEASURES
    ) -> None:
        self._problem = problem
        self._programs = programs = RingPrograms(problem, devices)
        options = ring_compiler_options(devices[0].platform)
        compiling: dict[str, Future] = {}
        with ThreadPoolExecutor(8) as pool:

            def add(f: Callable[..., Any], *args: Any) -> None:
                lowered = jax.jit(f, compiler_options=options).lower(*args)
                compiling[f.__name__] = pool.submit(lowered.compile)

            q, k, v, dout = programs.inputs
            add(programs.forward, q, k, v, programs.index)
            add(programs.both, q, k, v, dout, programs.index)
            if problem.sparse and "select" in measures:
                add(programs.select, q, k)
            if "silent" in measures and problem.gpus > 1:
                jax.clear_caches()  # must not reuse traces with collectives
                add(programs.silent, q, k, v, dout, programs.index)
        self._compiled = {name: future.result() for name, future in compiling.items()}

    def measure(self, masks: str, seed: int, repeats: int) -> Iterator[Row]:
        """Times all programs on each of some masks (letters)."""
        problem, programs = self._problem, self._programs
        q, k, v, dout = programs.random_inputs(seed)
        forward, both = self._compiled["forward"], self._compiled["both"]
        timed = functools.partial(median_ms, repeats=repeats)
        for mask in (m for m in ("AB" if problem.sparse else "D") if m in masks):
            rng = np.random.default_rng([seed, ord(mask), problem.seq_len])
            pattern = slash_mask(mask, rng, problem.heads, problem.seq_len)
            index = DenseIndex(BLOCK)
            if problem.sparse:
                index = jax.device_put(index_like(pattern, programs.index), programs.everywhere)
            row = Row(
                problem, mask, pattern.work().flops(problem.dim),
                forward=timed(functools.partial(forward, q, k, v, index)),
                both=timed(functools.partial(both, q, k, v, dout, index)),
                temp=both.memory_analysis().temp_size_in_bytes,
            )  # fmt: skip
            if silent := self._compiled.get("silent"):
                row.silent = timed(functools.partial(silent, q, k, v, dout, index))
            if select := self._compiled.get("select"):
                row.select = timed(functools.partial(select, q, k))
                row.step = timed(lambda index=index: (select(q, k), both(q, k, v, dout, index)))
            yield row
