"""Sampled rows with columns for packed documents."""

import dataclasses
from typing import TYPE_CHECKING

from mtraining_jax.sparsity.pattern import Shards
from mtraining_jax.sparsity.sampled_rows import SampledRows, samples

if TYPE_CHECKING:
    from jax import Array

    from pallas_kernels.index import BlockMaskIndex


@dataclasses.dataclass(frozen=True)
class DocumentSampledRows(SampledRows):
    """`SampledRows` with columns, for packed sequences.

    Each document of at least `dense_below` tokens has up to `columns` key columns, found by its own
    queries and seen by its own rows. The capacity covers as many documents as may have that length;
    kernels gather all of it.
    """

    def index(self, q: "Array", k: "Array", shards: Shards) -> "BlockMaskIndex":
        from mtraining_jax.sparsity import document_columns
        from mtraining_jax.sparsity.document_slots import DocumentSlots
        from mtraining_jax.sparsity.row_rule import kept_blocks
        from pallas_kernels.index import BlockMaskIndex

        rule = self.rule(shards)
        size, documents = self.block_size, shards.documents
        rows, num_blocks = shards.block_ids, shards.num_blocks
        slots = DocumentSlots.of(documents, self._slots(num_blocks))
        tokens = document_columns.heaviest_columns(q, k, shards, slots, size, self.columns, rule)
        queries, places = samples(q, shards, size, self.sampled_rows)
        scores, beside = document_columns.masses_without(
            queries, k, places, tokens, slots, shards, size, like=q
        )
        bits = kept_blocks(scores, rows, rule, documents, beside)
        index = BlockMaskIndex(bits, num_blocks, size)
        index = index.with_columns(tokens.reshape(*tokens.shape[:2], -1), rows)
        index = dataclasses.replace(index, max_columns=self._room(num_blocks))
        return index.columns_from(documents.of(rows).first[:, None])

    def for_documents(self) -> "DocumentSampledRows":
        return self

    def capacities(self, num_blocks: int) -> tuple[int, int]:
        # Those of `SampledRows`, a number per row, and the columns of many documents.
        return super().capacities(num_blocks)[0] + num_blocks, self._room(num_blocks)

    def _room(self, num_blocks: int) -> int:
        return min(self._slots(num_blocks) * self.columns, num_blocks * self.block_size)

    def _slots(self, num_blocks: int) -> int:
        """Maximum number of documents of `dense_below` tokens in a sequence, at least 1."""
        return max(num_blocks // max(-(-self.dense_below // self.block_size), 1), 1)
