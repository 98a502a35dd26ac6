"""Problems of the attention benchmark: compiled at once, then timed one after another."""

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from benchmarks.kernels import programs
from benchmarks.kernels.masks import BLOCK, Work, block_mask, slash_mask
from benchmarks.kernels.rows import OWN, Row, Shape
from benchmarks.timing import median_ms
from pallas_kernels import BlockSparseIndex


class Case:
    """Compiled programs of one shape and one kind of pattern.

    Kinds are "slash" (masks A and B share every program), "dense", "blocks" and "cudnn".
    """

    def __init__(self, shape: Shape, kind: str, kernels: programs.Attention) -> None:
        self._shape, self._kind = shape, kind
        self._index: Any = None
        with ThreadPoolExecutor(8) as pool:
            compiling = self._lower(kernels, pool)
        self._programs = {name: future.result() for name, future in compiling.items()}

    def _lower(self, kernels: programs.Attention, pool: ThreadPoolExecutor) -> dict[str, Future]:
        compiling = {}

        def add(name: str, f: Callable[..., Any], *args: Any) -> Any:
            lowered = jax.jit(f).lower(*args)
            compiling[name] = pool.submit(lowered.compile)
            return lowered.out_info

        q, k, v, dout = programs.abstract_inputs(self._shape)
        if self._kind == "cudnn":
            _, vjp = add("forward", functools.partial(jax.vjp, programs.cudnn_attention), q, k, v)
            add("backward", lambda vjp, dout: vjp(dout), vjp, dout)
            return compiling
        if self._kind == "slash":
            select = functools.partial(programs.select, backend=kernels.backend)
            self._index = add("select", select, q, k)
        elif self._kind == "blocks":
            blocks = self._shape.seq_len // BLOCK
            mask = jax.ShapeDtypeStruct((1, self._shape.heads, blocks, blocks), bool)
            self._index = jax.eval_shape(_from_blocks, mask)
        built = add("build", kernels.build, q, k, v, self._index)
        out, lse = add("forward", kernels.forward, q, k, v, built)
        add("backward", kernels.backward, q, k, v, dout, out, lse, built)
        add("together", kernels.together, q, k, v, dout, self._index)
        return compiling

    def measure(
        self, inputs: list[jax.Array], mask: str, rng: np.random.Generator, repeats: int
    ) -> Row:
        """Times the programs on one mask of the kind."""
        q, k, v, dout = inputs
        timed = functools.partial(median_ms, repeats=repeats)
        forward, backward = self._programs["forward"], self._programs["backward"]
        if self._kind == "cudnn":
            row = Row(self._shape, mask, "cuDNN")
            _, vjp = forward(q, k, v)
            row.forward = timed(lambda: forward(q, k, v))
            row.backward = timed(lambda: backward(vjp, dout))
            row.total = row.forward + row.backward
            row.temp = backward.memory_analysis().temp_size_in_bytes
            return row
        index, work = self._pattern(mask, rng)
        row = Row(self._shape, mask, OWN, work)
        build, together = self._programs["build"], self._programs["together"]
        built = build(q, k, v, index)
        out, lse = forward(q, k, v, built)
        if self._kind == "slash":
            row.select = timed(lambda: self._programs["select"](q, k))
        row.build = timed(lambda: build(q, k, v, index))
        row.forward = timed(lambda: forward(q, k, v, built))
        row.backward = timed(lambda: backward(q, k, v, dout, out, lse, built))
        row.total = timed(lambda: together(q, k, v, dout, index))
        row.temp = together.memory_analysis().temp_size_in_bytes
        return row

    def _pattern(self, mask: str, rng: np.random.Generator) -> tuple[Any, Work]:
        heads, seq_len = self._shape.heads, self._shape.seq_len
        if self._kind == "blocks":
            blocks = block_mask(rng, heads, seq_len)
            return jax.jit(_from_blocks)(blocks[None]), Work(int(blocks.sum()))
        pattern = slash_mask(mask, rng, heads, seq_len)
        index = None if self._kind == "dense" else programs.index_like(pattern, self._index)
        return index, pattern.work()


def _from_blocks(mask: jax.Array) -> BlockSparseIndex:
    return BlockSparseIndex.from_block_mask(mask, BLOCK)
