"""What patterns that choose by last queries share where documents are packed."""

import dataclasses
from typing import TYPE_CHECKING, Any

from mtraining_jax.sparsity.pattern import Choice, Pattern, Shards
from mtraining_jax.sparsity.vertical_slash import COLUMN_MULTIPLE

if TYPE_CHECKING:
    from jax import Array

    from mtraining_jax.sparsity.document_slots import DocumentSlots
    from mtraining_jax.sparsity.spans import Spans


class DocumentLastQueries(Pattern):
    """Columns and diagonals for each document of a pack, by its own last queries.

    Each document of at least `dense_below` tokens has columns and diagonals of its own, by its own
    last real queries over its own keys; no other document sees them. Shorter ones keep all of their
    pairs. A document chooses what it would alone, but for one limit: the columns of all documents
    of a sequence share the room of 2 `max_verticals`, by their lengths (`most_columns`).

    Diagonals are kept as bits, so they have no limit of room.

    A class that derives from it and from the pattern for one sequence has its fields, `last_q`,
    `max_verticals` and `dense_below` among them, and says what `least_columns`, `kept` and, if not
    by softmax mass, `scores` are.
    """

    by_rows = True

    def least_columns(self) -> int:
        """Columns that a document may keep whatever its length."""
        raise NotImplementedError(f"{type(self).__name__}.least_columns")

    def kept(
        self, by_distance: "Array", heads: "Array", spans: "Spans", most_columns: "Array",
        shares: "Array | None" = None,
    ) -> tuple:
        """What is kept of scores, `last_queries.Kept`.

        Args:
            by_distance: [2, R, NB, g], as in `last_queries.Rule.keys`.
            heads: int32 [R], see there.
            spans: the sequences.
            most_columns: int32 [R, E], at most `max_verticals`: most of each sequence.
            shares: int32 [R], as of `Shards`, for patterns that have a `KeptShare`.
        """
        raise NotImplementedError(f"{type(self).__name__}.kept")

    def scores(
        self, q_last: "Array", k: "Array", slots: "DocumentSlots", shards: Shards
    ) -> tuple:
        """Scores of local columns and diagonals: softmax masses, if not said otherwise.

        Args:
            q_last: [B, E, Hq, last_q, D], the last queries of each document.
            k: [B, n, Hk, D], local keys.
            slots: the documents.
            shards: where the keys lie.

        Returns:
            As `document_slots.softmax_scores`.
        """
        from mtraining_jax.sparsity import document_slots

        return document_slots.softmax_scores(q_last, k, slots, shards)

    def statistics(self, saved: "Array") -> dict[str, "Array"]:
        """What to report of fp32 [B, Hq], the share of documents that `document_choice` tells."""
        return {}

    def choose(self, q: "Array", k: "Array", shards: Shards) -> Choice:
        """Chooses for each document.

        Raises:
            ValueError: if an array of the pattern is of another number of heads.
        """
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
        """Most columns of a document.

        Args:
            blocks: those of the document; a number or int32 array.
            num_blocks: NB, blocks of the sequence.

        Returns:
            Its share of 2 `max_verticals`, rounded down; at least what is always kept, and at most
            `max_verticals`.
        """
        import jax.numpy as jnp

        room = 2 * self.max_verticals
        # In two parts, as the product of room and blocks may not fit.
        share = room // num_blocks * blocks + room % num_blocks * blocks // num_blocks
        return jnp.clip(share, self.least_columns(), self.max_verticals)

    def capacities(self, num_blocks: int) -> tuple[int, int]:
        """A bit for each block and for each token, and a number for each row of blocks."""
        bits = num_blocks * (-(-num_blocks // 32) + -(-self.block_size // 32) + 1)
        return bits, self.column_capacity(num_blocks)

    def column_capacity(self, num_blocks: int) -> int:
        """Most columns of all documents of a sequence of NB blocks, rounded up to 128."""
        slots = self._slots(num_blocks)
        most = 2 * self.max_verticals + slots * self.least_columns()
        most = min(most, slots * self.max_verticals, num_blocks * self.block_size)
        return -(-most // COLUMN_MULTIPLE) * COLUMN_MULTIPLE

    def _least_blocks(self) -> int:
        """A document of fewer blocks than this has fewer tokens than `dense_below`."""
        return -(-self.dense_below // self.block_size)

    def _slots(self, num_blocks: int) -> int:
        """Documents of a sequence that can be as long as that; at least 1."""
        return max(num_blocks // max(self._least_blocks(), 1), 1)


def for_documents(pattern: Pattern, cls: type[DocumentLastQueries]) -> Any:
    """A pattern for documents with all fields of one for a single sequence."""
    fields = dataclasses.fields(pattern)
    return cls(**{field.name: getattr(pattern, field.name) for field in fields})
