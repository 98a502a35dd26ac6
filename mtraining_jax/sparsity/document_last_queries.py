"""Common base of patterns that probe the last queries, for packed documents."""

import dataclasses
from typing import TYPE_CHECKING, Any

from mtraining_jax.sparsity.pattern import Choice, Pattern, Shards
from mtraining_jax.sparsity.vertical_slash import COLUMN_MULTIPLE

if TYPE_CHECKING:
    from jax import Array

    from mtraining_jax.sparsity.document_slots import DocumentSlots
    from mtraining_jax.sparsity.spans import Spans


class DocumentLastQueries(Pattern):
    """Columns and diagonals for each document of a pack, from its own last queries.

    Each document of at least `dense_below` tokens has its own columns and diagonals, selected by
    its own last real queries over its own keys. Shorter documents are dense. A document gets the
    same selection as on its own, except for one limit: all documents of a sequence share the room
    of 2 `max_verticals` columns in proportion to their lengths (`most_columns`).

    Diagonals are stored as bits and have no such limit.

    Subclasses also derive from the pattern for single sequences, with fields `last_q`,
    `max_verticals` and `dense_below`. They define `least_columns`, `kept` and, if not by softmax
    mass, `scores`.
    """

    by_rows = True

    def least_columns(self) -> int:
        """Number of columns that a document may keep whatever its length."""
        raise NotImplementedError(f"{type(self).__name__}.least_columns")

    def kept(
        self,
        by_distance: "Array",
        heads: "Array",
        spans: "Spans",
        most_columns: "Array",
        shares: "Array | None" = None,
    ) -> tuple:
        """Selects by scores; returns `last_queries.Kept`.

        Args:
            by_distance: [2, R, NB, g], as in `last_queries.Rule.keys`.
            heads: int32 [R], the query head of each row.
            spans: the sequences.
            most_columns: int32 [R, E], column limit of each sequence, at most `max_verticals`.
            shares: int32 [R], as in `Shards`, for patterns with a `KeptShare`.
        """
        raise NotImplementedError(f"{type(self).__name__}.kept")

    def scores(self, q_last: "Array", k: "Array", slots: "DocumentSlots", shards: Shards) -> tuple:
        """Scores local columns and diagonals; by softmax mass unless overridden.

        Args:
            q_last: [B, E, Hq, last_q, D], the last queries of each document.
            k: [B, n, Hk, D], local keys.
            slots: the documents.
            shards: the shards of the sequence.

        Returns:
            The result of `document_slots.softmax_scores`.
        """
        from mtraining_jax.sparsity import document_slots

        return document_slots.softmax_scores(q_last, k, slots, shards)

    def statistics(self, saved: "Array") -> dict[str, "Array"]:
        """Reports fp32 [B, Hq], the document fraction returned by `document_choice.choose`."""
        return {}

    def choose(self, q: "Array", k: "Array", shards: Shards) -> Choice:
        from mtraining_jax.sparsity import document_choice
        from mtraining_jax.sparsity.checks import check_heads
        from mtraining_jax.sparsity.document_slots import DocumentSlots

        check_heads(self, q.shape[2])
        documents = shards.documents.dense_below(self._least_blocks())
        shards = dataclasses.replace(shards, documents=documents)
        slots = DocumentSlots.of(documents, self._slots(shards.num_blocks))
        index, saved = document_choice.choose(q, k, shards, slots, self)
        return Choice(index, self.statistics(saved))

    def for_documents(self) -> "DocumentLastQueries":
        return self

    def most_columns(self, blocks: "int | Array", num_blocks: int) -> "int | Array":
        """Returns the column limit of a document.

        Args:
            blocks: number of blocks of the document; an int or int32 array.
            num_blocks: NB, blocks of the sequence.

        Returns:
            Its share of 2 `max_verticals` by length, rounded down; at least `least_columns` and at
            most `max_verticals`.
        """
        import jax.numpy as jnp

        room = 2 * self.max_verticals
        # In two parts, since the product of room and blocks may overflow.
        share = room // num_blocks * blocks + room % num_blocks * blocks // num_blocks
        return jnp.clip(share, self.least_columns(), self.max_verticals)

    def capacities(self, num_blocks: int) -> tuple[int, int]:
        # One bit per block and per token, and a number per row of blocks.
        bits = num_blocks * (-(-num_blocks // 32) + -(-self.block_size // 32) + 1)
        return bits, self.column_capacity(num_blocks)

    def column_capacity(self, num_blocks: int) -> int:
        """Column capacity of all documents of a sequence of NB blocks, rounded up to 128."""
        slots = self._slots(num_blocks)
        most = 2 * self.max_verticals + slots * self.least_columns()
        most = min(most, slots * self.max_verticals, num_blocks * self.block_size)
        return -(-most // COLUMN_MULTIPLE) * COLUMN_MULTIPLE

    def _least_blocks(self) -> int:
        """Documents of fewer blocks than this have fewer tokens than `dense_below`."""
        return -(-self.dense_below // self.block_size)

    def _slots(self, num_blocks: int) -> int:
        """Maximum number of such long documents in a sequence, at least 1."""
        return max(num_blocks // max(self._least_blocks(), 1), 1)


def for_documents(pattern: Pattern, cls: type[DocumentLastQueries]) -> Any:
    """Converts a pattern for single sequences to its class for documents, with equal fields."""
    fields = dataclasses.fields(pattern)
    return cls(**{field.name: getattr(pattern, field.name) for field in fields})
