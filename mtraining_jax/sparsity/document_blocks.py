"""What each block of a sequence must know of the document that it belongs to, on the device."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.index import bits as sets


class DocumentBlocks(NamedTuple):
    """The documents of some sequences, looked up for each block.

    Attributes:
        first: int32 [B, NB], the first block of the document; NB for a block of no document.
        length: int32 [B, NB], blocks of the document; 0 for a block of none.
        tokens: int32 [B, NB], real tokens of the document; 0 for a block of none.
        dense: bool [B, NB], whether the document keeps all of its causal pairs.
    """

    first: Array
    length: Array
    tokens: Array
    dense: Array

    @classmethod
    def from_table(cls, table: Array) -> "DocumentBlocks":
        """Those of a table int32 [B, NB, 3], as in `Documents`; none is dense."""
        first, end, tokens = (table[..., i].astype(jnp.int32) for i in range(3))
        inside = tokens > 0
        return cls(first, jnp.where(inside, end - first, 0), tokens, jnp.zeros_like(inside))

    def dense_below(self, blocks: int) -> "DocumentBlocks":
        """The same, where documents of fewer blocks are dense."""
        return self._replace(dense=self.length < blocks)

    def of(self, blocks: Array) -> "DocumentBlocks":
        """Those of some blocks int32 [n]: arrays [B, n]."""
        return DocumentBlocks(*(x[:, blocks] for x in self))

    def spans(self) -> tuple[Array, Array]:
        """Int32 [B, NB] twice: the first block of each block's document, and one past its last.

        For a block of no document NB and 0.
        """
        return self.first, jnp.where(self.length > 0, self.first + self.length, 0)

    def ends(self, block_size: int) -> Array:
        """Int32 [B, NB]: the position behind the document's last real token; 0 for no document."""
        return jnp.where(self.length > 0, self.first * block_size + self.tokens, 0)

    def contain(self, blocks: Array) -> Array:
        """Whether the document of each block holds each of some blocks.

        Args:
            blocks: int32 [C], global numbers.

        Returns:
            Bool [B, NB, C]; all False for a block of no document.
        """
        first = self.first[..., None]
        return (blocks >= first) & (blocks < first + self.length[..., None])

    def causal_blocks(self, rows: Array, num_blocks: int) -> Array:
        """All blocks of each row's document up to the row's own, as sets.

        Args:
            rows: int32 [n], global numbers of the rows of blocks.
            num_blocks: NB.

        Returns:
            uint32 [B, 1, n, ceil(NB/32)], bits as in `BlockMaskIndex`.
        """
        return sets.ranges(self.of(rows).first, rows, num_blocks)[:, None]

    def causal_pairs(self, block_size: int) -> Array:
        """Pairs of dense causal attention within the documents, their padding included.

        Returns:
            Float [B, 1], rounded, as it may exceed 2^31.
        """
        blocks = jnp.arange(self.first.shape[1], dtype=jnp.int32)
        inside = self.length > 0
        whole = jnp.where(inside, blocks - self.first, 0).sum(-1, dtype=jnp.int32)
        cut = inside.sum(-1, dtype=jnp.int32)
        to_float = jnp.result_type(float)
        pairs = whole.astype(to_float) * block_size**2
        pairs += cut.astype(to_float) * (block_size * (block_size + 1) // 2)
        return pairs[:, None]
