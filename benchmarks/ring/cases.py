"""Problems of the ring benchmark: compiled ahead of time, then timed mask by mask."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.kernels.masks import BLOCK, SlashMask, slash_mask
from benchmarks.ring import balance
from benchmarks.ring.programs import Problem, RingPrograms
from benchmarks.timing import median_ms
from mtraining_jax.parallel.compiler import ring_compiler_options
from pallas_kernels.index import DenseIndex, Index, VerticalSlashIndex

PASSES = 3.5  # FLOP of forward and backward over those of forward, as published rates count them
MEASURES = ("index", "silent", "local")


@dataclasses.dataclass
class Row:
    """A row of the table; times are medians in ms, None where nothing was measured.

    Attributes:
        problem: what was computed.
        mask: "A", "B" or "D" (dense causal).
        repeats: runs per median.
        flops: executed in a forward pass, over all ranks.
        forward: output.
        both: output and gradients in one program, for a given index.
        step: selection and then `both`.
        choose: selection over all ranks.
        build: columns and plans of one rank for all steps of both passes, on one GPU.
        silent: `both` on all ranks without communication.
        local: `both` of the busiest rank on one GPU, without communication.
        temp: bytes per GPU beyond arguments and results of `both`, from the compiler.
        peak: largest number of bytes in use on a GPU so far, from the allocator.
        layer_balance: `balance.layer_imbalance`.
        step_balance: `balance.step_imbalance`.
        worst_step: largest of `balance.imbalance_of_steps`.
    """

    problem: Problem
    mask: str
    repeats: int
    flops: float
    forward: float | None = None
    both: float | None = None
    step: float | None = None
    choose: float | None = None
    build: float | None = None
    silent: float | None = None
    local: float | None = None
    temp: int | None = None
    peak: int | None = None
    layer_balance: float | None = None
    step_balance: float | None = None
    worst_step: float | None = None

    @classmethod
    def from_json(cls, values: dict) -> "Row":
        """The row that `dataclasses.asdict` turned into JSON."""
        return cls(**values | {"problem": Problem(**values["problem"])})

    @property
    def backward(self) -> float:
        """Time of the gradients: `both` minus `forward`."""
        return self.both - self.forward

    def rate(self, ms: float | None, passes: float = PASSES) -> float | None:
        """Executed TFLOP/s per GPU."""
        if not ms:
            return None
        return passes * self.flops / self.problem.gpus / ms / 1e9


class Case:
    """Programs of one problem, being compiled.

    Args:
        pool: compiles; tracing and lowering happen at once.
        problem: what to compute.
        devices: at least as many as the problem has ranks.
        measures: which of `MEASURES` to compile and time in addition to forward and both.
    """

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        problem: Problem,
        devices: list[jax.Device],
        measures: tuple[str, ...] = MEASURES,
    ):
        self.problem = problem
        self.programs = programs = RingPrograms(problem, devices)
        options = ring_compiler_options(devices[0].platform)
        self._compiled: dict[str, Future] = {}
        q, k, v, dout = programs.sharded
        on_one = programs.index_on_one, programs.rank

        def add(name: str, f: Callable[..., Any], *args: Any) -> None:
            if name in ("silent", "local"):  # must not reuse traces with collectives
                jax.clear_caches()
            lowered = jax.jit(f, compiler_options=options).lower(*args)
            self._compiled[name] = pool.submit(lowered.compile)

        add("forward", programs.forward, q, k, v, programs.index)
        add("both", programs.both, q, k, v, dout, programs.index)
        if problem.sparse and "index" in measures:
            add("choose", programs.select, q, k)
            add("build", programs.build, *programs.shard[:3], *on_one)
        if "silent" in measures and problem.gpus > 1:
            add("silent", programs.silent, q, k, v, dout, programs.index)
        if "local" in measures and problem.gpus > 1:
            add("local", programs.local, *programs.shard, *on_one)

    def wait(self) -> None:
        """Waits until all programs are compiled."""
        for future in self._compiled.values():
            future.result()

    def prepare(self, masks: str, seed: int) -> None:
        """Draws inputs and masks (letters), and counts the balance; this can share the device."""
        problem = self.problem
        self._inputs = self.programs.random_inputs(seed)
        self._prepared: list[tuple[Row, Index, int]] = []
        for mask in (m for m in ("AB" if problem.sparse else "D") if m in masks):
            rng = np.random.default_rng([seed, ord(mask), problem.seq_len])
            pattern = slash_mask(mask, rng, problem.heads, problem.seq_len)
            index = self._index(pattern) if problem.sparse else DenseIndex(BLOCK)
            tiles = balance.tiles_per_step(jax.device_get(index), problem.topology())
            row = Row(
                problem,
                mask,
                0,
                pattern.work().flops(problem.dim),
                layer_balance=float(balance.layer_imbalance(tiles)),
                step_balance=float(balance.step_imbalance(tiles)),
                worst_step=float(balance.imbalance_of_steps(tiles).max()),
            )
            self._prepared.append((row, index, int(tiles.sum((2, 3)).argmax())))
        jax.block_until_ready(self._inputs)

    def measure(self, repeats: int, seconds: float) -> Iterator[Row]:
        """Times all programs on each prepared mask.

        The repeats of a program take `seconds` at most together; slower programs are repeated less
        often, at least 3 times.
        """
        for row, index, rank in self._prepared:
            row.repeats = repeats
            self._measure(row, index, rank, seconds)
            yield row

    def _measure(self, row: Row, index, rank: int, seconds: float) -> None:
        q, k, v, dout = self._inputs
        devices = list(self.programs.mesh.devices.flat)
        shard = [
            next(s.data for s in x.addressable_shards if s.device == devices[0])
            for x in self._inputs
        ]
        compiled = {name: future.result() for name, future in self._compiled.items()}
        both, forward = compiled["both"], compiled["forward"]
        row.temp = both.memory_analysis().temp_size_in_bytes
        jax.block_until_ready(both(q, k, v, dout, index))
        begin = time.perf_counter()
        jax.block_until_ready(both(q, k, v, dout, index))
        once = time.perf_counter() - begin
        row.repeats = max(min(row.repeats, int(seconds / max(once, 1e-6))), min(row.repeats, 3))
        timed = functools.partial(median_ms, repeats=row.repeats)
        row.both = timed(lambda: both(q, k, v, dout, index))
        row.peak = _peak(devices)
        row.forward = timed(lambda: forward(q, k, v, index))
        if silent := compiled.get("silent"):
            row.silent = timed(lambda: silent(q, k, v, dout, index))
        on_one = jax.device_put((index, jnp.int32(rank)), devices[0])
        if local := compiled.get("local"):
            row.local = timed(lambda: local(*shard, *on_one))
        if select := compiled.get("choose"):
            row.choose = timed(lambda: select(q, k))
            row.step = timed(lambda: (select(q, k), both(q, k, v, dout, index)))
            row.build = timed(lambda: compiled["build"](*shard[:3], *on_one))

    def _index(self, pattern: SlashMask) -> VerticalSlashIndex:
        abstract = self.programs.index
        index = pattern.index(abstract.slash_blocks.shape[-1], abstract.vertical_tokens.shape[-1])
        return jax.device_put(index, NamedSharding(self.programs.mesh, P()))


def _peak(devices) -> int | None:
    """The most memory that any device has had in use so far."""
    stats = [device.memory_stats() for device in devices]
    if not all(stats):
        return None
    return max(x.get("peak_bytes_in_use", 0) for x in stats)
