"""The documents of sequences by block, on the device."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.index import bits as sets

_ALL_TOKENS = 1 << 30  # more than any sequence has


class DocumentBlocks(NamedTuple):
    """Documents packed into sequences: the document of each block.

    Attributes:
        first: int32 [B, NB], first block of the document; NB for blocks without a document.
        length: int32 [B, NB], number of blocks of the document; 0 without a document.
        tokens: int32 [B, NB], number of real tokens; 0 without a document. More than its blocks
            have means all of them.
        dense: bool [B, NB], whether the document uses dense attention.
    """

    first: Array
    length: Array
    tokens: Array
    dense: Array

    @property
    def packed(self) -> bool:
        """Whether there may be several documents; False in `OneDocument`."""
        return True

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
        tokens = jnp.minimum(self.tokens, self.length * block_size)
        return jnp.where(self.length > 0, self.first * block_size + tokens, 0)

    def contain(self, blocks: Array) -> Array:
        """Whether the document of each block contains each given block: bool [B, NB, C]."""
        first = self.first[..., None]
        return (blocks >= first) & (blocks < first + self.length[..., None])

    def causal_blocks(self, rows: Array, num_blocks: int) -> Array:
        """Returns the blocks of each row's document up to the row, int32 [n]: uint32 [B, 1, n, w].

        Bits as in `BlockMaskIndex`.
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


class OneDocument(DocumentBlocks):
    """A sequence that is a single document, with padding after it or none; arrays are [1, NB].

    Its entries are constants of the program, so they cost nothing. It is never dense.
    """

    @classmethod
    def of_sequence(cls, num_blocks: int, valid_len: Array | None = None) -> "OneDocument":
        """Describes a sequence of NB blocks; `valid_len` is None if it has no padding."""
        first = jnp.zeros((1, num_blocks), jnp.int32)
        tokens = first + (_ALL_TOKENS if valid_len is None else valid_len)
        return cls(first, first + num_blocks, tokens, jnp.zeros_like(first, bool))

    @property
    def packed(self) -> bool:
        return False

    def dense_below(self, blocks: int) -> "OneDocument":
        del blocks  # whatever its length: the caller selected a sparse pattern for it
        return self

    def of(self, blocks: Array) -> DocumentBlocks:
        # Not a lookup, which would hide from the compiler that they are constants.
        return DocumentBlocks(*(jnp.broadcast_to(x[:, :1], (1, *blocks.shape)) for x in self))
