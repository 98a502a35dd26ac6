"""Fixed budgets per layer and head, from MInference files (arXiv 2407.02490)."""

import dataclasses
import os
from typing import TYPE_CHECKING

import numpy as np

from mtraining_jax.patterns.base import ModelSizes, Settings
from mtraining_jax.patterns.budget_file import read_heads
from mtraining_jax.patterns.probe_pattern import ProbePattern
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.limits import NonNegativeInt, PositiveInt, check_at_most, check_limits

if TYPE_CHECKING:
    from jax import Array

    from mtraining_jax.selection.rules import top_p
    from mtraining_jax.selection.spans import Spans


class BudgetPattern(ProbePattern):
    """Common base of patterns with a number of columns and of diagonals for each head."""

    verticals: "Array | np.ndarray"
    slashes: "Array | np.ndarray"

    def rule(self, heads: "Array", spans: "Spans") -> "top_p.Rule":
        """Returns the rule that keeps as many entries as the budgets of int32 [R] heads."""
        import jax.numpy as jnp

        from mtraining_jax.selection.rules import top_p
        from mtraining_jax.selection.scores import last_queries

        budgets = jnp.stack([jnp.asarray(self.verticals), jnp.asarray(self.slashes)])
        caps = last_queries.per_kind([self.max_verticals, self.max_slashes], spans)
        budgets = jnp.clip(spans.per_row(budgets[:, heads]), 0, jnp.minimum(caps, spans.tokens))
        return top_p.Rule(minimum=0, maximum=budgets.astype(jnp.int32))


@dataclasses.dataclass(frozen=True)
class FixedBudget(BudgetPattern):
    """A fixed number of verticals and slashes for each head.

    A pytree: budgets are data, so layers can be stacked as [L, Hq] and scanned over; the caps are
    static and shared by all layers.

    Attributes:
        verticals: int32 [Hq], number of columns kept by each head.
        slashes: int32 [Hq], number of diagonals kept by each head.
        max_verticals: Static cap, at least the largest entry of `verticals`.
        max_slashes: Static cap, at least the largest entry of `slashes`.
        num_probe_queries: Number of probe queries at the end of the sequence; at most `block_size`.
        block_size: Block size in tokens (g).
        sink_tokens: Number of first columns that rank above all others.
        sliding_window: Number of nearest diagonals that rank above all others.
        min_sparse_tokens: Documents shorter than this, including padding, use dense attention. Has no
            effect without documents.
    """

    arrays = ("verticals", "slashes")
    by_logits = True

    verticals: "Array | np.ndarray"
    slashes: "Array | np.ndarray"
    max_verticals: int
    max_slashes: int
    num_probe_queries: int = 64
    block_size: int = 128
    sink_tokens: int = 30
    sliding_window: int = 100
    min_sparse_tokens: int = 8192

    def __post_init__(self) -> None:
        for name, least in (
            ("block_size", 1),
            ("num_probe_queries", 1),
            ("max_verticals", 0),
            ("max_slashes", 0),
            ("sink_tokens", 0),
            ("sliding_window", 0),
            ("min_sparse_tokens", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        check_at_most(self, "num_probe_queries", "block_size")

    def keys(
        self, by_distance: "Array", heads: "Array", spans: "Spans", shares: "Array | None"
    ) -> "tuple[Array, top_p.Rule]":
        """Returns keys in the order of the sums of logits; forced entries rank first."""
        import jax.numpy as jnp

        from mtraining_jax.selection.rules import top_p

        numbers = spans.entries(by_distance.shape[-1])
        forced = jnp.stack([numbers < self.sink_tokens, numbers < self.sliding_window])
        # Rows with a single sequence share these numbers; rows with several have one set each.
        forced = forced.reshape(2, -1, *numbers.shape[-2:])
        scores = jnp.where(forced, jnp.inf, by_distance)
        tokens = spans.spread(jnp.asarray(spans.tokens))[..., None]
        keys = top_p.float_keys(jnp.where(numbers < tokens, scores, -jnp.inf))
        return keys, self.rule(heads, spans)

    def least_columns(self) -> int:
        # The sinks.
        return min(self.sink_tokens, self.max_verticals)


@dataclasses.dataclass(frozen=True)
class BudgetFile(Settings):
    """Budgets of all layers of a model, from a file.

    Attributes:
        budget_file: MInference JSON file with a budget for each layer and head; required.
        num_probe_queries: Number of probe queries at the end of the sequence; at most block_size.
        sink_tokens: Number of first tokens that are always kept as verticals.
        sliding_window: Number of nearest slashes (token distances) that are always kept, within the
            budget.
        block_size: Block size in tokens (g).
        min_sparse_tokens: Documents shorter than this, including padding, use dense attention. Has no
            effect without documents.
    """

    reads_documents = True

    budget_file: str | None = None
    num_probe_queries: PositiveInt = 64
    sink_tokens: NonNegativeInt = 30
    sliding_window: NonNegativeInt = 100
    block_size: PositiveInt = 128
    min_sparse_tokens: NonNegativeInt = 8192

    def __post_init__(self) -> None:
        check_limits(self)
        check_at_most(self, "num_probe_queries", "block_size")
        if not self.budget_file:
            raise ValueError("budget_file=none is not allowed; set it to a MInference JSON file")

    def pattern(self, model: ModelSizes) -> BudgetPattern:
        """Returns the budgets of all layers, [L, Hq].

        Raises:
            UserError: if the file cannot be read or does not match the model.
        """
        budgets = self._budgets()
        found, needed = budgets.verticals.shape, (model.num_layers, model.num_heads)
        if found != needed:
            raise UserError(
                f"budget file {self.budget_file} has {found[0]} layers of {found[1]} heads, but "
                f"the model has {needed[0]} layers of {needed[1]} heads"
            )
        return budgets

    def row_sharded(self, documents: bool) -> bool:
        return documents

    def _budgets(self) -> BudgetPattern:
        return load_budgets(str(self.budget_file)).pattern(
            num_probe_queries=self.num_probe_queries,
            block_size=self.block_size,
            sink_tokens=self.sink_tokens,
            sliding_window=self.sliding_window,
            min_sparse_tokens=self.min_sparse_tokens,
        )

    def describe(self) -> str:
        return f"vertical-slash with fixed budgets from {self.budget_file}"

    def more_pairs(self) -> str:
        return f"increase the budgets in sparsity.budget_file = {self.budget_file}"

    def capacities(self, num_blocks: int, documents: bool = False) -> tuple[int, int]:
        # Those of the largest budgets of any layer.
        return self._budgets().capacities(num_blocks, documents)


@dataclasses.dataclass(frozen=True)
class FixedBudgets:
    """Budgets of all layers of a model.

    Attributes:
        verticals: int32 [L, Hq], number of columns kept by each head of each layer.
        slashes: int32 [L, Hq], number of diagonals kept.
    """

    verticals: np.ndarray
    slashes: np.ndarray

    def pattern(self, **settings: int) -> FixedBudget:
        """Returns the pattern of all layers, to scan over or index by layer (`jax.tree.map`).

        Its arrays are [L, Hq]; `select_index` takes one layer's row, [Hq]. The caps are the largest
        budgets of any layer. `settings` are other fields of `FixedBudget`, such as num_probe_queries.
        """
        return FixedBudget(
            verticals=self.verticals,
            slashes=self.slashes,
            max_verticals=int(self.verticals.max()),
            max_slashes=int(self.slashes.max()),
            **settings,
        )


def load_budgets(path: str | os.PathLike) -> FixedBudgets:
    """Reads budgets from a MInference file (`budget_file.read_heads`).

    Types and scores are ignored: every head is treated as vertical-slash, as in the reference
    implementation of arXiv 2510.18830. The kind `minference` reads the types.

    Args:
        path: JSON file.

    Raises:
        UserError: if the file cannot be read or is malformed; the message names layer and head.
    """
    table = np.array([[head[1:] for head in layer] for layer in read_heads(path)], np.int32)
    return FixedBudgets(verticals=table[..., 0], slashes=table[..., 1])
