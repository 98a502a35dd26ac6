"""Vertical-slash for packed documents: verticals and slashes per document."""

import dataclasses
from typing import TYPE_CHECKING

from mtraining_jax.sparsity.document_last_queries import DocumentLastQueries
from mtraining_jax.sparsity.vertical_slash import VerticalSlash

if TYPE_CHECKING:
    from jax import Array

    from mtraining_jax.sparsity.spans import Spans


@dataclasses.dataclass(frozen=True)
class DocumentVerticalSlash(DocumentLastQueries, VerticalSlash):
    """`VerticalSlash` for packed sequences.

    With the preset paper, `saved_heads` is the fraction of documents and heads that would have been
    left without any column.
    """

    def least_columns(self) -> int:
        # Sinks and the minimum (safe), sinks (joint), or a single column (paper).
        if self.preset == "paper":
            return min(1, self.max_verticals)
        least = self.min_verticals if self.preset == "safe" else 0
        return max(least, self.sink_tokens)

    def kept(
        self,
        by_distance: "Array",
        heads: "Array",
        spans: "Spans",
        most_columns: "Array",
        shares: "Array | None" = None,
    ) -> tuple:
        return VerticalSlash.kept(self, by_distance, heads, spans, most_columns, shares)

    def statistics(self, saved: "Array") -> dict[str, "Array"]:
        return {"saved_heads": saved} if self.preset == "paper" else {}
