"""Problems of the attention benchmark: compiled once, then timed one after another."""

import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from benchmarks.kernels import programs
from benchmarks.kernels.masks import BLOCK, Work, block_mask, causal_tiles, dense_flops, slash_mask
from benchmarks.timing import median_ms
from pallas_kernels import BlockSparseIndex

OWN = "mtraining-jax"  # the kernels of this repository, in the column "kernels"


@dataclasses.dataclass(frozen=True)
class Shape:
    """One problem size; batch 1, bf16."""

    seq_len: int
    heads: int
    kv_heads: int
    dim: int

    def abstract(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of q, k, v and dout."""
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [jax.ShapeDtypeStruct((1, self.seq_len, n, self.dim), "bfloat16") for n in heads]


@dataclasses.dataclass
class Row:
    """A row of the table: times in ms and memory in bytes, None where nothing was measured.

    Attributes:
        work: None for dense causal attention, counted as half of S x S.
        temp: memory of the whole step beyond inputs and outputs, from the compiler.
        peak: the same from the device's allocator.
    """

    shape: Shape
    mask: str
    who: str
    work: Work | None = None
    select: float | None = None
    build: float | None = None
    forward: float | None = None
    backward: float | None = None
    total: float | None = None
    temp: int | None = None
    peak: int | None = None

    def density(self) -> tuple[float, float]:
        """Executed blocks and columns over the causal blocks."""
        if self.work is None:
            return 1.0, 0.0
        every = causal_tiles(self.shape.heads, self.shape.seq_len)
        return self.work.tiles / every, self.work.bars / BLOCK / every

    def rates(self, which: str) -> tuple[float, float] | None:
        """TFLOP/s of "forward" or "backward": executed, and as if dense."""
        if (ms := getattr(self, which)) is None:
            return None
        passes = 1.0 if which == "forward" else 2.5
        shape = self.shape
        dense = dense_flops(shape.heads, shape.seq_len, shape.dim)
        executed = dense if self.work is None else self.work.flops(shape.dim)
        return passes * executed / ms / 1e9, passes * dense / ms / 1e9


class Case:
    """Programs of one shape and one kind of pattern, being compiled; traced and lowered at once.

    Kinds are "slash" (masks A and B share every program), "dense", "blocks" and "cudnn".
    """

    def __init__(
        self, pool: ThreadPoolExecutor, shape: Shape, kind: str, kernels: programs.Attention
    ):
        self.shape, self.kind = shape, kind
        q, k, v, dout = shape.abstract()
        self._programs: dict[str, Future] = {}

        def add(name: str, f: Callable[..., Any], *args: Any) -> Any:
            lowered = jax.jit(f).lower(*args)
            self._programs[name] = pool.submit(lowered.compile)
            return lowered.out_info

        if kind == "cudnn":
            _, vjp = add("forward", programs.cudnn_forward, q, k, v)
            add("backward", programs.cudnn_backward, vjp, dout)
            return
        if kind == "slash":
            select = functools.partial(programs.select, backend=kernels.backend)
            index = add("select", select, q, k)
        elif kind == "blocks":
            blocks = shape.seq_len // BLOCK
            mask = jax.ShapeDtypeStruct((1, shape.heads, blocks, blocks), bool)
            index = jax.eval_shape(_from_blocks, mask)
        else:
            index = None
        self._index = index
        built = add("build", kernels.build, q, k, v, index)
        out, lse = add("forward", kernels.forward, q, k, v, built)
        add("backward", kernels.backward, q, k, v, dout, out, lse, built)
        add("together", kernels.together, q, k, v, dout, index)

    def wait(self) -> None:
        """Waits until all programs are compiled."""
        for future in self._programs.values():
            future.result()

    def program(self, name: str) -> Any:
        """A compiled program."""
        return self._programs[name].result()

    def measure(self, inputs: list[jax.Array], mask: str, rng, repeats: int) -> Row:
        """Times the programs on one mask of the kind."""
        if self.kind == "cudnn":
            return self._measure_cudnn(inputs, repeats)
        q, k, v, dout = inputs
        index, work = self._pattern(mask, rng)
        row = Row(self.shape, mask, OWN, work)
        together = self.program("together")
        row.temp = together.memory_analysis().temp_size_in_bytes
        row.peak = _peak(lambda: together(q, k, v, dout, index))
        built = self.program("build")(q, k, v, index)
        out, lse = self.program("forward")(q, k, v, built)
        if self.kind == "slash":
            row.select = median_ms(lambda: self.program("select")(q, k), repeats)
        row.build = median_ms(lambda: self.program("build")(q, k, v, index), repeats)
        row.forward = median_ms(lambda: self.program("forward")(q, k, v, built), repeats)
        row.backward = median_ms(
            lambda: self.program("backward")(q, k, v, dout, out, lse, built), repeats
        )
        row.total = median_ms(lambda: together(q, k, v, dout, index), repeats)
        return row

    def _pattern(self, mask: str, rng: np.random.Generator) -> tuple[Any, Work]:
        heads, seq_len = self.shape.heads, self.shape.seq_len
        if self.kind == "blocks":
            blocks = block_mask(rng, heads, seq_len)
            return jax.jit(_from_blocks)(blocks[None]), Work(int(blocks.sum()))
        pattern = slash_mask(mask, rng, heads, seq_len)
        if self.kind == "dense":
            return None, pattern.work()
        capacity = self._index
        index = pattern.index(capacity.slash_blocks.shape[-1], capacity.vertical_tokens.shape[-1])
        return index, pattern.work()

    def _measure_cudnn(self, inputs: list[jax.Array], repeats: int) -> Row:
        q, k, v, dout = inputs
        forward, backward = self.program("forward"), self.program("backward")
        row = Row(self.shape, "D", "cuDNN")
        _, vjp = forward(q, k, v)
        row.forward = median_ms(lambda: forward(q, k, v), repeats)
        row.backward = median_ms(lambda: backward(vjp, dout), repeats)
        row.total = row.forward + row.backward
        row.temp = backward.memory_analysis().temp_size_in_bytes
        return row


def _from_blocks(mask: jax.Array) -> BlockSparseIndex:
    return BlockSparseIndex.from_block_mask(mask, BLOCK)


def _peak(run: Callable[[], Any]) -> int | None:
    """Device memory of a first run beyond its results and what was in use before, in bytes.

    None where the device does not report it, or where something before took more.
    """
    device = jax.devices()[0]
    before = device.memory_stats()
    if not before or "peak_bytes_in_use" not in before:
        return None
    result = jax.block_until_ready(run())
    after = device.memory_stats()
    if after["peak_bytes_in_use"] <= before["peak_bytes_in_use"]:
        return None
    size = sum(x.nbytes for x in jax.tree.leaves(result))
    return after["peak_bytes_in_use"] - before["bytes_in_use"] - size
