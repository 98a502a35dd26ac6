"""Vertical-slash where documents are packed: columns and diagonals for each of them."""

import dataclasses
from typing import TYPE_CHECKING

from mtraining_jax.sparsity.pattern import Choice, Shards
from mtraining_jax.sparsity.vertical_slash import COLUMN_MULTIPLE, VerticalSlash

if TYPE_CHECKING:
    from jax import Array


@dataclasses.dataclass(frozen=True)
class DocumentVerticalSlash(VerticalSlash):
    """What `VerticalSlash` is where documents are packed into sequences.

    Each document of at least `dense_below` tokens has columns and diagonals of its own, by its own
    last real queries over its own keys; no other document sees them. Shorter ones keep all of their
    pairs. A document chooses what it would alone, but for one limit: the columns of all documents
    of a sequence share the room of 2 `max_verticals`, by their lengths (`most_columns`).

    Diagonals are kept as bits, so they have no limit of room.
    """

    by_rows = True

    def choose(self, q: "Array", k: "Array", shards: Shards) -> Choice:
        """Chooses for each document; `saved_heads` is the share of documents and heads."""
        from mtraining_jax.sparsity import document_choice
        from mtraining_jax.sparsity.document_slots import DocumentSlots

        documents = shards.documents.dense_below(self._least_blocks())
        shards = dataclasses.replace(shards, documents=documents)
        slots = DocumentSlots.of(documents, self._slots(shards.num_blocks))
        index, saved = document_choice.choose(q, k, shards, slots, self)
        return Choice(index, {"saved_heads": saved} if self.preset == "paper" else {})

    def for_documents(self) -> "DocumentVerticalSlash":
        """Itself."""
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

    def least_columns(self) -> int:
        """Columns that a document keeps whatever its length."""
        if self.preset == "paper":
            return min(1, self.max_verticals)
        least = self.min_verticals if self.preset == "safe" else 0
        return max(least, self.sink_tokens)

    def _least_blocks(self) -> int:
        """A document of fewer blocks than this has fewer tokens than `dense_below`."""
        return -(-self.dense_below // self.block_size)

    def _slots(self, num_blocks: int) -> int:
        """Documents of a sequence that can be as long as that; at least 1."""
        return max(num_blocks // max(self._least_blocks(), 1), 1)
