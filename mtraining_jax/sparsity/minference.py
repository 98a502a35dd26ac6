"""MInference's fixed patterns: a type and two budgets for each head, found offline."""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from mtraining_jax.errors import UserError
from mtraining_jax.sparsity.budget_file import read_heads
from mtraining_jax.sparsity.fixed_budget import BudgetFile
from mtraining_jax.sparsity.pattern import Choice, Pattern, Shards

if TYPE_CHECKING:
    from jax import Array

    from mtraining_jax.sparsity.last_queries import Rule
    from mtraining_jax.sparsity.spans import Spans

# The least columns and diagonals of a vertical-slash head in the reference implementation.
_LEAST_COLUMNS, _LEAST_DIAGONALS = 30, 50
# What MInference's own search writes for a head whose best type was block_sparse.
_SWAPPED = "vertical_and_slash", 1000, 6096


@dataclasses.dataclass(frozen=True)
class MInference(Pattern):
    """Per head, given numbers of the columns and diagonals with most softmax mass.

    The mass is that of the last `last_q` queries. Forced columns and diagonals count within the
    numbers and come first. Of equal masses the smaller position or distance comes first. A
    diagonal acts through the block diagonals that it touches, and the main one is always on.

    Causality: the last queries of the sequence decide for all others.

    Source: MInference (arXiv 2407.02490). Its reference rounds masses to the model's dtype before
    it sorts them; these are whole multiples of 2^-30.

    A pytree: its arrays are data, so a stack of layers [L, Hq] can be scanned over.

    Attributes:
        verticals: int32 [Hq], columns kept by each head.
        slashes: int32 [Hq], diagonals kept by each head.
        sinks: int32 [Hq], first columns, which are forced.
        windows: int32 [Hq], nearest diagonals, which are forced.
        max_verticals: static cap, at least the largest entry of `verticals`.
        max_slashes: static cap, at least the largest entry of `slashes`.
        max_sinks: static cap, at least the largest entry of `sinks`.
        last_q: queries at the end of the sequence whose attention is the estimate.
        block_size: g, tokens on a side of a block; `last_q` must not exceed it.
        dense_below: documents of fewer tokens than this, padding included, keep all of their pairs
            where several are packed into a sequence. Without documents it has no effect.
    """

    arrays = ("verticals", "slashes", "sinks", "windows")

    verticals: "Array"
    slashes: "Array"
    sinks: "Array"
    windows: "Array"
    max_verticals: int
    max_slashes: int
    max_sinks: int
    last_q: int = 64
    block_size: int = 128
    dense_below: int = 8192

    def choose(self, q: "Array", k: "Array", shards: Shards) -> Choice:
        """Keeps as many columns and diagonals as the budgets say.

        Raises:
            ValueError: if the budgets are of another number of heads.
        """
        from mtraining_jax.sparsity import last_queries
        from mtraining_jax.sparsity.checks import check_heads

        check_heads(self, q.shape[2])
        return Choice(last_queries.choose(q, k, shards, self, self.rule())[0])

    def rule(self) -> "Rule":
        """What of the masses is kept."""
        return _Rule(self)

    def for_documents(self) -> "MInference":
        """As many columns and diagonals for each document."""
        from mtraining_jax.sparsity.document_budgets import DocumentMInference
        from mtraining_jax.sparsity.document_last_queries import for_documents

        return for_documents(self, DocumentMInference)


@dataclasses.dataclass(frozen=True)
class MInferenceFile(BudgetFile):
    """MInference's patterns of all layers of a model, from one of its published files.

    Heads of type `vertical_and_slash` keep max(first number, 30) columns and max(second, 50)
    diagonals, those of type `stream_llm` the first tokens and the nearest ones. Other types are
    refused, but for `block_sparse`, which `swap_block_sparse` replaces.

    Attributes:
        swap_block_sparse: whether a head of type `block_sparse`, which no published file has, is
            given 1000 columns and 6096 diagonals, as MInference's own search does. Otherwise it
            is refused.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    swap_block_sparse: bool = False

    def for_documents(self) -> "MInferenceFile":
        """As many columns and diagonals for each document."""
        from mtraining_jax.sparsity.document_budgets import DocumentMInferenceFile
        from mtraining_jax.sparsity.document_last_queries import for_documents

        return for_documents(self, DocumentMInferenceFile)

    def _budgets(self) -> MInference:
        table = np.array(
            [
                [self._numbers(head, layer, number) for number, head in enumerate(heads)]
                for layer, heads in enumerate(read_heads(self.budget_file))
            ],
            np.int32,
        )
        verticals, slashes, sinks, windows = np.moveaxis(table, -1, 0)
        return MInference(
            verticals, slashes, sinks, windows, int(verticals.max()), int(slashes.max()),
            int(sinks.max()), self.last_q, self.block_size, self.dense_below,
        )  # fmt: skip

    def _numbers(
        self, head: tuple[str, int, int], layer: int, number: int
    ) -> tuple[int, int, int, int]:
        """Columns, diagonals, forced columns and forced diagonals of one head."""
        if head[0] == "block_sparse" and self.swap_block_sparse:
            head = _SWAPPED
        kind, first, second = head
        if kind == "vertical_and_slash":
            columns, diagonals = max(first, _LEAST_COLUMNS), max(second, _LEAST_DIAGONALS)
            return columns, diagonals, self.sink_tokens, self.sliding_window
        if kind == "stream_llm":
            return first, second, first, second
        advice = (
            "; swap_block_sparse=true gives such heads 1000 columns and 6096 diagonals, as "
            "MInference's search does"
            if kind == "block_sparse"
            else ""
        )
        raise UserError(
            f"budget file {self.budget_file}, layer {layer}, head {number} is of type {kind!r}; it "
            f"must be 'vertical_and_slash' or 'stream_llm'{advice}"
        )

    def describe(self) -> str:
        """Where the budgets are from."""
        return f"MInference with the budgets of {self.budget_file}"


@dataclasses.dataclass(frozen=True)
class _Rule:
    """The rule for `last_queries.choose`."""

    pattern: MInference

    def scores(self, q_last: "Array", k: "Array", shards: Shards, scale: float) -> tuple:
        """Mean softmax masses."""
        from mtraining_jax.sparsity import estimate

        return estimate.softmax_scores(
            q_last, k, scale=scale, backend=shards.backend, axis_names=shards.axis_names,
            block_ids=shards.block_ids, num_blocks=shards.num_blocks, valid_len=shards.valid_len,
        )  # fmt: skip

    def keys(self, by_distance: "Array", heads: "Array", spans: "Spans") -> tuple:
        """Masses plus one, with the highest bit set for what is forced, and 0 for padding."""
        import jax.numpy as jnp

        from mtraining_jax.sparsity import last_queries, select

        pattern = self.pattern
        numbers = spans.entries(by_distance.shape[-1])
        forced = jnp.stack([jnp.asarray(pattern.sinks), jnp.asarray(pattern.windows)])
        forced = numbers < forced[:, heads, None, None]
        keys = by_distance.astype(jnp.uint32) + 1
        keys = jnp.where(forced, jnp.uint32(1 << 31), keys)
        tokens = spans.spread(jnp.asarray(spans.tokens))[..., None]
        keys = jnp.where(numbers < tokens, keys, 0)
        budgets = jnp.stack([jnp.asarray(pattern.verticals), jnp.asarray(pattern.slashes)])
        caps = last_queries.per_kind([pattern.max_verticals, pattern.max_slashes], spans)
        budgets = jnp.clip(spans.per_row(budgets[:, heads]), 0, jnp.minimum(caps, spans.tokens))
        return keys, select.Rule(minimum=0, maximum=budgets.astype(jnp.int32))

    def nearest(self, slash_count: "Array", spans: "Spans") -> int:
        """The main block diagonal."""
        return 1
