"""One problem of the ring benchmark: compiled ahead of time, then timed mask by mask."""

import dataclasses
import functools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.kernels.masks import BLOCK, SlashMask, slash_mask
from benchmarks.ring.balance import ring_balance
from benchmarks.ring.programs import Problem, RingPrograms
from benchmarks.timing import median_ms
from mtraining_jax.parallel.compiler import ring_compiler_options
from pallas_kernels.index import DenseIndex, Index, VerticalSlashIndex

PASSES = 3.5  # FLOP of forward and backward over those of forward, as published rates count them
MEASURES = ("index", "silent", "local")


@dataclasses.dataclass
class Row:
    """A line of the table; times in ms, medians, None where nothing was measured.

    Attributes:
        problem: what was computed.
        mask: "A", "B" or "D" (dense causal).
        repeats: number of runs that a median is taken over.
        flops: executed in a forward pass, over all ranks.
        forward: output.
        both: output and gradients, one program, index given.
        step: choosing an index and `both`, one after another.
        choose: the index, over all ranks.
        build: columns and plans of one rank for all steps of both passes, on one GPU.
        silent: `both` on all ranks without communication.
        local: `both` of the busiest rank on one GPU, without communication.
        temp: bytes a GPU beyond arguments and results of `both`, as the compiler reserves them.
        peak: bytes a GPU in use at most so far, as the allocator saw it.
        layer_balance: executed tiles of the busiest rank over the mean, in the whole layer.
        step_balance: tiles on the path of waits over those of the mean rank.
        worst_step: busiest over mean of the most uneven step.
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

    @property
    def backward(self) -> float:
        """Time of the gradients: `both` minus `forward`."""
        return self.both - self.forward

    def rate(self, ms: float | None, passes: float = PASSES) -> float | None:
        """Executed TFLOP/s a GPU."""
        if not ms:
            return None
        return passes * self.flops / self.problem.gpus / ms / 1e9


class Cell:
    """Programs of one problem, being compiled.

    Args:
        pool: compiles; tracing and lowering happen at once.
        problem: what to compute.
        devices: at least as many as the problem has ranks.
        measures: which of `MEASURES` to compile and time in addition to forward and both.
    """

    def __init__(
        self, pool: ThreadPoolExecutor, problem: Problem, devices: list[jax.Device],
        measures: tuple[str, ...] = MEASURES,
    ):
        self.problem = problem
        self.programs = RingPrograms(problem, devices)
        self._options = ring_compiler_options(devices[0].platform)
        self._compiled: dict[str, Future] = {}
        shapes = self.programs.shapes()
        q, k, v, dout = shapes.sharded()
        shard = shapes.shard()

        def add(name: str, f: Callable[..., Any], *args: Any) -> None:
            if name in ("silent", "local"):  # must not find what was traced with collectives
                jax.clear_caches()
            lowered = jax.jit(f, compiler_options=self._options).lower(*args)
            self._compiled[name] = pool.submit(lowered.compile)

        add("forward", self.programs.forward, q, k, v, shapes.index())
        add("both", self.programs.both, q, k, v, dout, shapes.index())
        if problem.sparse and "index" in measures:
            add("choose", self.programs.choose, q, k)
            add("build", self.programs.build, *shard[:3], shapes.index(one=True), shapes.rank())
        if "silent" in measures and problem.gpus > 1:
            add("silent", self.programs.silent, q, k, v, dout, shapes.index())
        if "local" in measures and problem.gpus > 1:
            add("local", self.programs.local, *shard, shapes.index(one=True), shapes.rank())

    def wait(self) -> None:
        """Until all programs are compiled."""
        for future in self._compiled.values():
            future.result()

    def masks(self, wanted: str) -> list[str]:
        """Those of the wanted masks that belong to this problem."""
        return [m for m in ("AB" if self.problem.sparse else "D") if m in wanted]

    def prepare(self, masks: str, seed: int) -> None:
        """Does what needs no device to itself: draws inputs and masks, and reports balance.

        Args:
            masks: letters; those of other kinds of problem are left out.
            seed: of inputs and masks.
        """
        problem = self.problem
        self._inputs = self.programs.random_inputs(seed)
        self._prepared: list[tuple[Row, Index, int]] = []
        for mask in self.masks(masks):
            rng = np.random.default_rng([seed, ord(mask), problem.seq_len])
            pattern = slash_mask(mask, rng, problem.heads, problem.seq_len)
            row = Row(problem, mask, 0, pattern.work().flops(problem.dim))
            index = self._index(pattern) if problem.sparse else DenseIndex(BLOCK)
            self._prepared.append((row, index, self._balance(row, index)))
        jax.block_until_ready(self._inputs)

    def measure(self, repeats: int, seconds: float, tell: Callable[[Row], None]) -> None:
        """Times all programs on each prepared mask and reports its row.

        Args:
            repeats: number of runs that a median is taken over.
            seconds: limit of all repeats together; where they would take longer, fewer are made,
                at least 3.
            tell: called with each row as soon as it is measured.
        """
        for row, index, rank in self._prepared:
            row.repeats = repeats
            self._measure(row, index, rank, seconds)
            tell(row)

    def _measure(self, row: Row, index, rank: int, seconds: float) -> None:
        q, k, v, dout = self._inputs
        shard = [self._first_shard(x) for x in self._inputs]
        both = self._compiled["both"].result()
        row.temp = both.memory_analysis().temp_size_in_bytes
        jax.block_until_ready(both(q, k, v, dout, index))
        begin = time.perf_counter()
        jax.block_until_ready(both(q, k, v, dout, index))
        once = time.perf_counter() - begin
        row.repeats = max(min(row.repeats, int(seconds / max(once, 1e-6))), min(row.repeats, 3))
        timed = functools.partial(median_ms, repeats=row.repeats)
        row.both = timed(lambda: both(q, k, v, dout, index))
        row.peak = _peak(self.programs.mesh.devices.flat)
        forward = self._compiled["forward"].result()
        row.forward = timed(lambda: forward(q, k, v, index))
        if "silent" in self._compiled:
            silent = self._compiled["silent"].result()
            row.silent = timed(lambda: silent(q, k, v, dout, index))
        one = self.programs.mesh.devices.flat[0]
        index_on_one, rank = jax.device_put((index, jnp.int32(rank)), one)
        if "local" in self._compiled:
            local = self._compiled["local"].result()
            row.local = timed(lambda: local(*shard, index_on_one, rank))
        if "choose" in self._compiled:
            choose = self._compiled["choose"].result()
            build = self._compiled["build"].result()
            row.choose = timed(lambda: choose(q, k))
            row.step = timed(lambda: (choose(q, k), both(q, k, v, dout, index)))
            row.build = timed(lambda: build(*shard[:3], index_on_one, rank))

    def _balance(self, row: Row, index: VerticalSlashIndex | DenseIndex) -> int:
        """Fills in the balance; returns the busiest rank."""
        balance = jax.jit(ring_balance, static_argnums=1)(
            jax.device_get(index), self.problem.topology()
        )
        row.layer_balance = float(balance.imbalance)
        row.step_balance = float(balance.step_imbalance)
        row.worst_step = float(balance.per_step.max())
        return int(np.asarray(balance.tiles).sum((2, 3)).argmax())

    def _index(self, pattern: SlashMask) -> VerticalSlashIndex:
        abstract = self.programs.shapes().index()
        index = pattern.index(
            abstract.slash_blocks.shape[-1], abstract.vertical_tokens.shape[-1]
        )
        return jax.device_put(index, NamedSharding(self.programs.mesh, P()))

    def _first_shard(self, x: jax.Array) -> jax.Array:
        one = self.programs.mesh.devices.flat[0]
        return next(s.data for s in x.addressable_shards if s.device == one)


def _peak(devices) -> int | None:
    """The most memory that any device has had in use so far."""
    stats = [device.memory_stats() for device in devices]
    if not all(stats):
        return None
    return max(x.get("peak_bytes_in_use", 0) for x in stats)
