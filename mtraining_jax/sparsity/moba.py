"""MoBA: each single query chooses chunks of keys by their means."""

import dataclasses
from typing import TYPE_CHECKING

from mtraining_jax.limits import check_limits, limited
from mtraining_jax.sparsity.pattern import Choice, Pattern, Shards

if TYPE_CHECKING:
    from jax import Array


@dataclasses.dataclass(frozen=True)
class MoBA(Pattern):
    """Per token and head, the chunks of keys whose means have the largest products with the query.

    A query sees its own chunk up to itself, and of the chunks that lie wholly before its own the
    `top_k` - 1 whose mean key has the largest product with it: all of them where there are fewer.
    Means are rounded to the dtype of the keys; products are fp32. Of equal products the earlier
    chunk comes first.

    The pairs are exact. No tile of 128 queries has one list, so the queries that see a chunk are
    gathered and computed together (`pallas_kernels.composed`): this takes `top_k` - 1 copies of
    the queries and of the output, in memory and, with the keys of all ranks, in the ring, which
    must be "gather".

    Where documents are packed, the chunks of each begin with it, and a query chooses among those of
    its own document: what it would choose were the document alone. A document of at most `top_k`
    chunks is so dense.

    Causality: strict. What a query sees depends on itself and on keys before its own chunk.

    Source: MoBA (arXiv 2502.13189); the defaults are those of its published code. Its authors
    train with it, and keep the last layers dense.

    Attributes:
        chunk_size: tokens of a chunk; a multiple of `block_size`.
        top_k: chunks that a query sees at most, its own among them.
        block_size: g, tokens on a side of a block of the kernels.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    by_rows = True

    chunk_size: limited(int, ge=1) = 4096
    top_k: limited(int, ge=1) = 12
    block_size: limited(int, ge=1) = 128

    def __post_init__(self) -> None:
        check_limits(self)
        if self.chunk_size % self.block_size:
            raise ValueError(
                f"chunk_size={self.chunk_size} must be a multiple of block_size={self.block_size}"
            )

    @property
    def dense_below(self) -> int:
        """Documents of fewer tokens than this, padding included, have all of their pairs."""
        return self.top_k * self.chunk_size + 1

    def more_pairs(self) -> str:
        """The field that more pairs follow from."""
        return f"sparsity.top_k = {self.top_k} may be larger"

    def choose(self, q: "Array", k: "Array", shards: Shards) -> Choice:
        """Chooses chunks for each local query."""
        import jax.numpy as jnp

        from mtraining_jax.sparsity.checks import check_choice
        from mtraining_jax.sparsity.chunk_gate import chosen_chunks
        from pallas_kernels.index import TokenChunksIndex

        check_choice(q, k, shards, self.block_size)
        blocks = self.chunk_size // self.block_size
        chunks = -(-shards.num_blocks // blocks)
        most = min(self.top_k, chunks)
        words = chosen_chunks(q, k, shards, blocks, most)
        index = TokenChunksIndex(words, shards.num_blocks, blocks, most, self.block_size)
        if shards.documents is not None:
            first = shards.first_blocks(shards.block_ids)[:, None]
            first = jnp.broadcast_to(first, words.shape[:3])
            index = dataclasses.replace(index, first=first)
        return Choice(index)

    def for_documents(self) -> "MoBA":
        """The pattern itself: each query chooses in its own document."""
        return self

    def describe(self) -> str:
        """Its name and sizes."""
        return f"MoBA, {self.top_k} chunks of {self.chunk_size} tokens for each token"

    def expected_density(self, tokens: int) -> tuple[float, str]:
        """Counted, as it depends on the length alone."""
        return self.density(tokens), "counted: it depends on the length alone"

    def density(self, seq_len: int) -> float:
        """Share of the causal pairs that is computed, whatever the queries are."""
        size, pairs = self.chunk_size, 0
        for chunk in range(-(-seq_len // size)):
            tokens = min(size, seq_len - chunk * size)
            pairs += tokens * (tokens + 1) // 2 + tokens * min(chunk, self.top_k - 1) * size
        return pairs / (seq_len * (seq_len + 1) // 2)

    def scoring_share(self) -> float:
        """One product for each query and chunk, of two for each pair."""
        return 1 / self.chunk_size

    def capacities(self, num_blocks: int) -> tuple[int, int]:
        """A bit for each query and chunk, and a number for each row of blocks; ranks share them."""
        chunks = -(-num_blocks * self.block_size // self.chunk_size)
        return num_blocks * (self.block_size * -(-chunks // 32) + 1), 0

    def query_copies(self, num_blocks: int) -> int:
        """One for each chunk that a query sees in addition to its own."""
        chunks = -(-num_blocks * self.block_size // self.chunk_size)
        return min(self.top_k, chunks) - 1
