"""Common base of patterns that select columns and diagonals with the last queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mtraining_jax.patterns.base import Pattern

if TYPE_CHECKING:
    from jax import Array

    from mtraining_jax.selection.rules import top_p
    from mtraining_jax.selection.scores.last_queries import ProbeScores
    from mtraining_jax.selection.segments import Segments

_COLUMN_MULTIPLE = 128  # column capacities are rounded up to a multiple of this


class ProbePattern(Pattern):
    """Per head, columns and diagonals by scores from the last queries of a sequence or document.

    Subclasses define which of the scores are kept, with `keys` and `nearest`.

    With documents, each one of at least `min_sparse_tokens` tokens gets the same selection as on
    its own, from its own last real queries and its own keys, except for one limit: all documents of
    a sequence share the room of 2 `max_verticals` columns in proportion to their lengths. Diagonals
    are then stored as bits and have no such limit. Shorter documents are dense.

    Attributes:
        by_logits: whether scores are sums of raw logits instead of softmax mass.
        num_probe_queries, min_sparse_tokens: fields, as in `VerticalSlash`.
        max_verticals, max_slashes: the caps of columns and of diagonals; None until `bind` if they
            depend on the model.
    """

    supports_documents = True
    by_logits: ClassVar[bool] = False

    num_probe_queries: int
    max_verticals: int | None
    max_slashes: int | None
    min_sparse_tokens: int

    def keys(self, probed: ProbeScores) -> tuple[Array, top_p.Rule]:
        """Returns selection keys, and how many of the largest to keep.

        Returns:
            Keys uint32 [2, R, NB, g], and a rule with fields that broadcast with [2, R, E].
        """
        raise NotImplementedError(f"{type(self).__name__}.keys")

    def nearest(self, slash_count: Array, segments: Segments) -> int | Array:
        """Returns how many nearest block diagonals are always kept, given int32 diagonals kept."""
        del slash_count, segments
        return 1

    def statistics(self, rescued: Array) -> dict[str, Array]:
        """Reports on fp32 or int32 [B, Hq], the fraction of sequences with `Selected.rescued`."""
        del rescued
        return {}

    def select(self, q, k, context):
        """Selects a `VerticalSlashIndex`, or with documents a `BlockMaskIndex` with columns."""
        from mtraining_jax.selection.context import Selection, with_dense_documents
        from mtraining_jax.selection.scores import last_queries
        from mtraining_jax.selection.segments import sparse_segments

        for name in self.arrays:
            if (shape := getattr(self, name).shape) != (q.shape[2],):
                raise ValueError(
                    f"{name} has shape {shape}, but there are {q.shape[2]} query heads"
                )
        least, num_blocks = self.blocks(self.min_sparse_tokens), context.num_blocks
        context = with_dense_documents(q, k, context, self.block_size, least)
        segments = sparse_segments(context, self.most_documents(num_blocks), self.block_size)
        probed = last_queries.probe(q, k, context, segments, self.num_probe_queries, self.by_logits)
        keys, rule = self.keys(probed)
        kept = last_queries.each_kind(keys, rule, self.nearest, probed.segments)
        sizes = q.shape[0], q.shape[2]
        if context.documents.packed:
            room = self.document_columns(num_blocks)
            index, rescued = last_queries.marks(kept, probed.segments, room, sizes, context)
            rescued = rescued / segments.count().clip(1)[:, None]
        else:
            capacities = self.list_capacities(num_blocks)
            index, rescued = last_queries.lists(kept, capacities, sizes, context)
        return Selection(index, self.statistics(rescued))

    def sharded_by_query(self, documents: bool) -> bool:
        return documents

    def caps(self) -> tuple[int, int]:
        """Returns `max_verticals` and `max_slashes` of a pattern that is bound."""
        assert self.max_verticals is not None and self.max_slashes is not None
        return self.max_verticals, self.max_slashes

    def least_columns(self) -> int:
        """Number of columns that a document may keep whatever its length."""
        raise NotImplementedError(f"{type(self).__name__}.least_columns")

    def most_columns(self, segments: Segments) -> Array:
        """Returns the column limit of each document: int32 [R, E], or [1, 1] for single ones."""
        (most, _), num_blocks = self.caps(), segments.num_blocks
        room = 2 * most
        # In two parts, since the product of room and blocks may overflow.
        share = (
            room // num_blocks * segments.length + room % num_blocks * segments.length // num_blocks
        )
        return share.clip(self.least_columns(), most)

    def most_diagonals(self, num_blocks: int) -> int:
        """Returns the number of block diagonals that a list has room for."""
        return min(2 * self.caps()[1] + 1, num_blocks)

    def list_capacities(self, num_blocks: int) -> tuple[int, int]:
        """Returns the room of a `VerticalSlashIndex` for columns and for block diagonals."""
        columns = min(_rounded(self.caps()[0]), num_blocks * self.block_size)
        return columns, self.most_diagonals(num_blocks)

    def document_columns(self, num_blocks: int) -> int:
        """Returns the room for the columns of all documents of a sequence of NB blocks."""
        documents, most = self.most_documents(num_blocks), self.caps()[0]
        columns = 2 * most + documents * self.least_columns()
        return _rounded(min(columns, documents * most, num_blocks * self.block_size))


def _rounded(columns: int) -> int:
    return -(-columns // _COLUMN_MULTIPLE) * _COLUMN_MULTIPLE
