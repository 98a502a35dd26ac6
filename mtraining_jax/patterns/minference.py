"""MInference's fixed patterns: a type and two budgets per head, found offline."""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from mtraining_jax.patterns.budget_file import read_heads
from mtraining_jax.patterns.fixed_budget import BudgetFile, BudgetPattern
from mtraining_jax.utils.errors import UserError

if TYPE_CHECKING:
    from jax import Array

    from mtraining_jax.selection.rules import top_p
    from mtraining_jax.selection.spans import Spans

# Minimum columns and diagonals of a vertical-slash head in the reference implementation.
_LEAST_COLUMNS, _LEAST_DIAGONALS = 30, 50
# What MInference's search writes for a head with best type block_sparse.
_SWAPPED = "vertical_and_slash", 1000, 6096


@dataclasses.dataclass(frozen=True)
class MInference(BudgetPattern):
    """Per head, a fixed number of the columns and diagonals with most softmax mass.

    The mass is that of the last `num_probe_queries` queries. Forced columns and diagonals come first and count
    toward the budgets. Ties go to the smaller position or distance. A diagonal selects the block
    diagonals that it touches; the main one is always selected.

    Causality: the last queries of the sequence determine the selection for all others.

    Source: MInference (arXiv 2407.02490). Its reference implementation rounds masses to the model's
    dtype before sorting; here they are multiples of 2^-30.

    A pytree: its arrays are data, so layers can be stacked as [L, Hq] and scanned over.

    Attributes:
        verticals: int32 [Hq], number of columns kept by each head.
        slashes: int32 [Hq], number of diagonals kept by each head.
        sinks: int32 [Hq], number of first columns, which are forced.
        windows: int32 [Hq], number of nearest diagonals, which are forced.
        max_verticals: Static cap, at least the largest entry of `verticals`.
        max_slashes: Static cap, at least the largest entry of `slashes`.
        max_sinks: Static cap, at least the largest entry of `sinks`.
        num_probe_queries: Number of probe queries at the end of the sequence; at most `block_size`.
        block_size: Block size in tokens (g).
        min_sparse_tokens: Documents shorter than this, including padding, use dense attention. Has no
            effect without documents.
    """

    arrays = ("verticals", "slashes", "sinks", "windows")

    verticals: "Array | np.ndarray"
    slashes: "Array | np.ndarray"
    sinks: "Array | np.ndarray"
    windows: "Array | np.ndarray"
    max_verticals: int
    max_slashes: int
    max_sinks: int
    num_probe_queries: int = 64
    block_size: int = 128
    min_sparse_tokens: int = 8192

    def keys(
        self, by_distance: "Array", heads: "Array", spans: "Spans", shares: "Array | None"
    ) -> "tuple[Array, top_p.Rule]":
        """Returns masses plus one, with the highest bit set if forced, and 0 for padding."""
        import jax.numpy as jnp

        numbers = spans.entries(by_distance.shape[-1])
        forced = jnp.stack([jnp.asarray(self.sinks), jnp.asarray(self.windows)])
        forced = numbers < forced[:, heads, None, None]
        keys = by_distance.astype(jnp.uint32) + 1
        keys = jnp.where(forced, jnp.uint32(1 << 31), keys)
        tokens = spans.spread(jnp.asarray(spans.tokens))[..., None]
        keys = jnp.where(numbers < tokens, keys, 0)
        return keys, self.rule(heads, spans)

    def least_columns(self) -> int:
        # The largest number of sinks of any head.
        return min(self.max_sinks, self.max_verticals)


@dataclasses.dataclass(frozen=True)
class MInferenceFile(BudgetFile):
    """MInference's patterns for all layers of a model, from one of its published files.

    Heads of type `vertical_and_slash` keep max(first number, 30) columns and max(second, 50)
    diagonals; heads of type `stream_llm` keep the first tokens and the nearest ones. Other types
    are rejected, except `block_sparse` with `swap_block_sparse`.

    Attributes:
        swap_block_sparse: Give heads of type block_sparse 1000 verticals and 6096 slashes, as
            MInference's search does. Otherwise such heads, which no published file has, are
            rejected.
    """

    swap_block_sparse: bool = False

    def _budgets(self) -> MInference:
        table = np.array(
            [
                [self._numbers(head, layer, number) for number, head in enumerate(heads)]
                for layer, heads in enumerate(read_heads(str(self.budget_file)))
            ],
            np.int32,
        )
        verticals, slashes, sinks, windows = np.moveaxis(table, -1, 0)
        return MInference(
            verticals,
            slashes,
            sinks,
            windows,
            int(verticals.max()),
            int(slashes.max()),
            int(sinks.max()),
            self.num_probe_queries,
            self.block_size,
            self.min_sparse_tokens,
        )

    def _numbers(
        self, head: tuple[str, int, int], layer: int, number: int
    ) -> tuple[int, int, int, int]:
        """Returns columns, diagonals, forced columns and forced diagonals of one head."""
        if head[0] == "block_sparse" and self.swap_block_sparse:
            head = _SWAPPED
        kind, first, second = head
        if kind == "vertical_and_slash":
            columns, diagonals = max(first, _LEAST_COLUMNS), max(second, _LEAST_DIAGONALS)
            return columns, diagonals, self.sink_tokens, self.sliding_window
        if kind == "stream_llm":
            return first, second, first, second
        advice = (
            "; set swap_block_sparse=true to give such heads 1000 columns and 6096 diagonals, as "
            "MInference's search does"
            if kind == "block_sparse"
            else ""
        )
        raise UserError(
            f"budget file {self.budget_file}, layer {layer}, head {number} has type {kind!r}; it "
            f"must be 'vertical_and_slash' or 'stream_llm'{advice}"
        )

    def describe(self) -> str:
        return f"MInference with budgets from {self.budget_file}"
