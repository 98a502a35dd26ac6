"""Fixed budgets of verticals and slashes for packed documents."""

import dataclasses
from typing import TYPE_CHECKING

from mtraining_jax.sparsity.document_last_queries import DocumentLastQueries
from mtraining_jax.sparsity.fixed_budget import BudgetFile, FixedBudget
from mtraining_jax.sparsity.minference import MInference, MInferenceFile
from mtraining_jax.sparsity.pattern import Pattern, Shards

if TYPE_CHECKING:
    from jax import Array

    from mtraining_jax.sparsity.document_slots import DocumentSlots
    from mtraining_jax.sparsity.spans import Spans


class _ByBudgets(DocumentLastQueries):
    """Common base: `rule` defines what is kept."""

    def kept(
        self,
        by_distance: "Array",
        heads: "Array",
        spans: "Spans",
        most_columns: "Array",
        shares: "Array | None" = None,
    ) -> tuple:
        from mtraining_jax.sparsity import last_queries

        del shares
        return last_queries.each_kind(self.rule(), by_distance, heads, spans, most_columns)


@dataclasses.dataclass(frozen=True)
class DocumentFixedBudget(_ByBudgets, FixedBudget):
    """`FixedBudget` for packed sequences; the budgets apply to each document."""

    def least_columns(self) -> int:
        # The sinks.
        return min(self.sink_tokens, self.max_verticals)

    def scores(self, q_last: "Array", k: "Array", slots: "DocumentSlots", shards: Shards) -> tuple:
        from mtraining_jax.sparsity import document_slots

        return document_slots.logit_scores(q_last, k, slots, shards)


@dataclasses.dataclass(frozen=True)
class DocumentMInference(_ByBudgets, MInference):
    """`MInference` for packed sequences; the budgets apply to each document."""

    def least_columns(self) -> int:
        # The largest number of sinks of any head.
        return min(self.max_sinks, self.max_verticals)


class _OfDocuments:
    """Common part of both file formats for packed sequences."""

    by_rows = True

    def for_documents(self) -> "_OfDocuments":
        return self

    def capacities(self, num_blocks: int) -> tuple[int, int]:
        # Those of the pattern with the largest budgets of any layer.
        return self._budgets().capacities(num_blocks)

    def _budgets(self) -> Pattern:
        return super()._budgets().for_documents()


@dataclasses.dataclass(frozen=True)
class DocumentBudgetFile(_OfDocuments, BudgetFile):
    """`BudgetFile` for packed sequences."""


@dataclasses.dataclass(frozen=True)
class DocumentMInferenceFile(_OfDocuments, MInferenceFile):
    """`MInferenceFile` for packed sequences."""
