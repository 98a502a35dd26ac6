"""Common base of patterns that select columns and diagonals with the last queries."""

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from mtraining_jax.patterns.base import Pattern, blocks_of, most_documents
from mtraining_jax.selection.context import Selection, SelectionContext

if TYPE_CHECKING:
    from jax import Array

    from mtraining_jax.selection.rules import top_p
    from mtraining_jax.selection.scores.last_queries import Kept, Probed
    from mtraining_jax.selection.spans import Spans

_COLUMN_MULTIPLE = 128  # column capacities are rounded up to a multiple of this


class ProbePattern(Pattern):
    """Per head, columns and diagonals by scores from the last queries of a sequence or document.

    Subclasses define which of the scores are kept: `keys` and `nearest`, or `kept` as a whole.

    With documents, each one of at least `min_sparse_tokens` tokens gets the same selection as on its own,
    from its own last real queries and its own keys, except for one limit: all documents of a
    sequence share the room of 2 `max_verticals` columns in proportion to their lengths. Diagonals
    are then stored as bits and have no such limit. Shorter documents are dense.

    Attributes:
        by_logits: whether scores are sums of raw logits instead of softmax mass.
    """

    reads_documents = True
    by_logits: ClassVar[bool] = False

    num_probe_queries: int
    max_verticals: int
    max_slashes: int
    min_sparse_tokens: int

    def keys(
        self, by_distance: "Array", heads: "Array", spans: "Spans", shares: "Array | None"
    ) -> "tuple[Array, top_p.Rule]":
        """Returns selection keys, and how many of the largest to keep.

        Args:
            by_distance: [2, R, NB, g], scores of columns, and of diagonals by distance, for each
                sequence. Entries after its tokens belong to no visible column or diagonal.
            heads: int32 [R], the query head of each row.
            spans: the sequences.
            shares: int32 [R], as in `SelectionContext`, for patterns with a `KeptShare`.

        Returns:
            Keys uint32 [2, R, NB, g], and a rule with fields that broadcast with [2, R], or with
            [2, R, E] if rows hold several sequences.
        """
        raise NotImplementedError(f"{type(self).__name__}.keys")

    def nearest(self, slash_count: "Array", spans: "Spans") -> "int | Array":
        """Returns how many nearest block diagonals are always kept, given int32 diagonals kept."""
        del slash_count, spans
        return 1

    def kept(self, probed: "Probed", most_columns: "Array | None") -> "Kept":
        """Selects by scores; `most_columns`, int32 [R, E], limits the columns of each document."""
        from mtraining_jax.selection.scores import last_queries

        by_distance, heads, spans, shares = probed
        keys, rule = self.keys(by_distance, heads, spans, shares)
        return last_queries.each_kind(keys, rule, self.nearest, spans, most_columns)

    def statistics(self, saved: "Array") -> dict[str, "Array"]:
        """Reports on fp32 or int32 [B, Hq], the fraction of sequences with `Kept.saved`."""
        del saved
        return {}

    def select(self, q: "Array", k: "Array", context: SelectionContext) -> Selection:
        """Selects a `VerticalSlashIndex`, or with documents a `BlockMaskIndex` with columns."""
        import jax.numpy as jnp

        from mtraining_jax.selection.checks import check_selection
        from mtraining_jax.selection.scores import last_queries
        from mtraining_jax.selection.spans import PackedSpans

        for name in self.arrays:
            if (shape := np.shape(getattr(self, name))) != (q.shape[2],):
                raise ValueError(
                    f"{name} has shape {shape}, but there are {q.shape[2]} query heads"
                )
        check_selection(q, k, context, self.block_size)
        num_blocks, sizes = context.num_blocks, (q.shape[0], q.shape[2])
        if context.documents is None:
            probed = last_queries.probe(q, k, context, self.num_probe_queries, self.by_logits)
            index, saved = last_queries.lists(
                self.kept(probed, None), self.list_capacities(num_blocks), sizes, context
            )
            return Selection(index, self.statistics(saved))
        documents = context.documents.min_sparse_tokens(self._least_blocks())
        slots = PackedSpans.of(documents, self._most_documents(num_blocks))
        probed = last_queries.probe_documents(
            q, k, context, slots, self.num_probe_queries, self.by_logits
        )
        spans = probed.spans
        assert isinstance(spans, PackedSpans)
        kept = self.kept(probed, self._most_columns(spans.length, num_blocks))
        index, saved = last_queries.marks(
            kept, spans, documents, self._document_columns(num_blocks), sizes, context
        )
        return Selection(index, self.statistics(saved / jnp.maximum(slots.count(), 1)[:, None]))

    def row_sharded(self, documents: bool) -> bool:
        return documents

    def capacities(self, num_blocks: int, documents: bool = False) -> tuple[int, int]:
        if documents:
            # One bit per block and per token, and a number per row of blocks.
            bits = num_blocks * (-(-num_blocks // 32) + -(-self.block_size // 32) + 1)
            return bits, self._document_columns(num_blocks)
        columns, diagonals = self.list_capacities(num_blocks)
        return diagonals + columns + 2, columns

    def least_columns(self) -> int:
        """Number of columns that a document may keep whatever its length."""
        raise NotImplementedError(f"{type(self).__name__}.least_columns")

    def most_diagonals(self, num_blocks: int) -> int:
        """Returns the number of block diagonals that a list has room for."""
        return min(2 * self.max_slashes + 1, num_blocks)

    def list_capacities(self, num_blocks: int) -> tuple[int, int]:
        """Returns the room of a `VerticalSlashIndex` for columns and for block diagonals."""
        rounded = _rounded(self.max_verticals)
        return min(rounded, num_blocks * self.block_size), self.most_diagonals(num_blocks)

    def _document_columns(self, num_blocks: int) -> int:
        """Returns the room for the columns of all documents of a sequence."""
        slots = self._most_documents(num_blocks)
        most = 2 * self.max_verticals + slots * self.least_columns()
        return _rounded(min(most, slots * self.max_verticals, num_blocks * self.block_size))

    def _most_columns(self, blocks: "Array", num_blocks: int) -> "Array":
        """Returns the column limit of documents of int32 blocks in a sequence of NB blocks."""
        import jax.numpy as jnp

        room = 2 * self.max_verticals
        # In two parts, since the product of room and blocks may overflow.
        share = room // num_blocks * blocks + room % num_blocks * blocks // num_blocks
        return jnp.clip(share, self.least_columns(), self.max_verticals)

    def _least_blocks(self) -> int:
        return blocks_of(self.min_sparse_tokens, self.block_size)

    def _most_documents(self, num_blocks: int) -> int:
        return most_documents(num_blocks, self._least_blocks())


def _rounded(columns: int) -> int:
    return -(-columns // _COLUMN_MULTIPLE) * _COLUMN_MULTIPLE
