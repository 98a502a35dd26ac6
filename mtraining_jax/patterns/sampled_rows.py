"""Key blocks by the exact attention of probe queries in each query block."""

from typing import Any

from mtraining_jax.patterns.row_pattern import RowPattern
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.limits import NonNegativeInt, PositiveInt, check_at_most


@options
class SampledRows(RowPattern):
    """Key blocks by the mean softmax mass of probe queries in each block, over all keys.

    The r probe queries of a block of g are at offsets (i+1) g / r - 1, rounded down: evenly spaced,
    including the last query. Costs r / (2 g) of a dense forward pass. Keys that only other queries
    attend to are missed. If padding follows within a block, g is its number of real queries, so
    that the last queries of a prompt, which look for its answer, are included.

    Masses are exact where XLA or Triton compute them; the Hopper kernel estimates them from keys in
    8 bits and a part of the exponentials (`pallas_kernels.fp8_scores`).

    A block list spends a whole block on a single important key. With `columns`, the distant keys
    with the most mass from 128 probe queries over the whole sequence are visible to all later
    queries, and block lists are selected by the remaining mass. With packed documents, each
    document has columns of its own.
    """

    probe_queries_per_block: PositiveInt = 16
    """Number of probe queries per query block (r); at most block_size."""
    columns: NonNegativeInt = 0
    """Maximum number of key columns per head, in addition to the block lists; 0 disables. Multiples
    of 128 are most efficient."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_most(self, "probe_queries_per_block", "block_size")

    def document_columns(self, num_blocks: int) -> int:
        """Returns the room for the columns of all documents of a sequence of NB blocks."""
        return min(self.most_documents(num_blocks) * self.columns, num_blocks * self.block_size)

    def keys(self, q, k, context):
        from mtraining_jax.selection.scores import probe_rows

        return k if self.columns else probe_rows.coded(q, k, context)

    def scores(self, q, k, context):
        from mtraining_jax.selection.scores import probe_rows

        return probe_rows.block_masses(q, k, context, self.probe_queries_per_block)

    def bits(self, q, k, context):
        from mtraining_jax.selection.scores import probe_rows

        kept = probe_rows.fp8_bits(q, k, context, self.probe_queries_per_block, self.rule(context))
        return super().bits(q, k, context) if kept is None else kept

    def rows_at_once(self, q, k, context):
        from mtraining_jax.selection.scores import probe_rows

        count = probe_rows.fp8_at_once(q, k, context, self.probe_queries_per_block)
        return super().rows_at_once(q, k, context) if count is None else count

    def index(self, q, k: Any, context):
        if not self.columns:
            return super().index(q, k, context)
        from mtraining_jax.selection.scores import row_columns

        documents = self.most_documents(context.num_blocks)
        room = self.document_columns(context.num_blocks)
        how = self.rule(context), self.probe_queries_per_block, self.columns, documents, room
        return row_columns.index_with_columns(q, k, context, *how)

    def describe(self) -> str:
        columns = f", up to {self.columns} columns per head" if self.columns else ""
        return (
            f"sampled rows: {self.probe_queries_per_block} probe queries per block, "
            f"{self.rule_in_words()}{columns}"
        )
