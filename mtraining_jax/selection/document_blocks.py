"""Per-block document tables of sequences, on the device."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.index import bits as sets


class DocumentBlocks(NamedTuple):
    """The document of each block of some sequences.

    Attributes:
        first: int32 [B, NB], first block of the document; NB for blocks without a document.
        length: int32 [B, NB], number of blocks of the document; 0 without a document.
        tokens: int32 [B, NB], number of real tokens of the document; 0 without a document.
        dense: bool [B, NB], whether the document uses dense attention.
    """

    first: Array
    length: Array
    tokens: Array
    dense: Array

    @classmethod
    def from_table(cls, table: Array) -> "DocumentBlocks":
        """Builds it from the table int32 [B, NB, 3] of `Documents`; no document is dense."""
        first, end, tokens = (table[..., i].astype(jnp.int32) for i in range(3))
        inside = tokens > 0
        return cls(first, jnp.where(inside, end - first, 0), tokens, jnp.zeros_like(inside))

    def dense_below(self, blocks: int) -> "DocumentBlocks":
        """Returns a copy in which documents of fewer blocks are dense."""
        return self._replace(dense=self.length < blocks)

    def of(self, blocks: Array) -> "DocumentBlocks":
        """Returns the entries of the given blocks, int32 [n]: arrays [B, n]."""
        return DocumentBlocks(*(x[:, blocks] for x in self))

    def spans(self) -> tuple[Array, Array]:
        """Returns first and one past the last block of each block's document: NB and 0 for none."""
        return self.first, jnp.where(self.length > 0, self.first + self.length, 0)

    def ends(self, block_size: int) -> Array:
        """Returns one past the document's last real token, int32 [B, NB]; 0 without a document."""
        return jnp.where(self.length > 0, self.first * block_size + self.tokens, 0)

    def contain(self, blocks: Array) -> Array:
        """Whether the document of each block contains each given block: bool [B, NB, C].

        False for blocks without a document.
        """
        first = self.first[..., None]
        return (blocks >= first) & (blocks < first + self.length[..., None])

    def causal_blocks(self, rows: Array, num_blocks: int) -> Array:
        """Returns all blocks of each row's document up to the row, int32 [n], as bit sets.

        The result is uint32 [B, 1, n, ceil(NB/32)], bits as in `BlockMaskIndex`.
        """
        return sets.ranges(self.of(rows).first, rows, num_blocks)[:, None]

    def causal_pairs(self, block_size: int) -> Array:
        """Counts the causal pairs within documents, including their padding: float [B, 1].

        Rounded, since it may exceed 2^31.
        """
        blocks = jnp.arange(self.first.shape[1], dtype=jnp.int32)
        inside = self.length > 0
        whole = jnp.where(inside, blocks - self.first, 0).sum(-1, dtype=jnp.int32)
        cut = inside.sum(-1, dtype=jnp.int32)
        to_float = jnp.result_type(float)
        pairs = whole.astype(to_float) * block_size**2
        pairs += cut.astype(to_float) * (block_size * (block_size + 1) // 2)
        return pairs[:, None]
