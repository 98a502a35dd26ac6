"""MoBA: each query selects chunks of keys by their means."""

import dataclasses
from typing import TYPE_CHECKING

from mtraining_jax.patterns.base import Pattern
from mtraining_jax.selection.context import Selection, SelectionContext
from mtraining_jax.utils.limits import PositiveInt, check_limits

if TYPE_CHECKING:
    from jax import Array


@dataclasses.dataclass(frozen=True)
class MoBA(Pattern):
    """Per token and head, the key chunks with the largest products of query and mean key.

    A query sees its own chunk up to itself, and the `top_k` - 1 complete earlier chunks whose mean
    key has the largest product with it, or all of them if there are fewer. Means are rounded to the
    dtype of the keys; products are fp32. Ties go to the earlier chunk.

    The pairs are exact. A tile of 128 queries has no common list, so the queries that see a chunk
    are gathered and computed together (`pallas_kernels.composed`). This needs memory for
    `top_k` - 1 copies of the queries and of the output, and for the keys of all ranks, and requires
    ring="gather".

    In packed sequences, chunks start at document boundaries and queries select chunks of their own
    document, as for the document on its own. Documents of at most `top_k` chunks are dense.

    Causality: strict. The selection of a query depends on itself and on keys before its own chunk.

    Source: MoBA (arXiv 2502.13189), with the defaults of its published code. Its authors train with
    it, and keep the last layers dense.

    Attributes:
        chunk_size: Chunk size in tokens; a multiple of block_size.
        top_k: Maximum number of chunks per query, including its own.
        block_size: Block size of the kernels in tokens (g).
    """

    by_rows = True
    reads_documents = True

    chunk_size: PositiveInt = 4096
    top_k: PositiveInt = 12
    block_size: PositiveInt = 128

    def __post_init__(self) -> None:
        check_limits(self)
        if self.chunk_size % self.block_size:
            raise ValueError(
                f"chunk_size={self.chunk_size} must be a multiple of block_size={self.block_size}"
            )

    @property
    def min_sparse_tokens(self) -> int:
        """Documents shorter than this, including padding, are dense in any case."""
        return self.top_k * self.chunk_size + 1

    def more_pairs(self) -> str:
        return f"increase sparsity.top_k = {self.top_k}"

    def select(self, q: "Array", k: "Array", context: SelectionContext) -> Selection:
        import jax.numpy as jnp

        from mtraining_jax.selection.checks import check_selection
        from mtraining_jax.selection.scores.chunk_gate import chosen_chunks
        from pallas_kernels.index import TokenChunksIndex

        check_selection(q, k, context, self.block_size)
        blocks = self.chunk_size // self.block_size
        chunks = -(-context.num_blocks // blocks)
        most = min(self.top_k, chunks)
        words = chosen_chunks(q, k, context, blocks, most)
        index = TokenChunksIndex(words, context.num_blocks, blocks, most, self.block_size)
        first = context.first_blocks(context.block_ids)
        if first is not None:
            first = jnp.broadcast_to(first[:, None], words.shape[:3])
            index = dataclasses.replace(index, first=first)
        return Selection(index)

    def describe(self) -> str:
        return f"MoBA, {self.top_k} chunks of {self.chunk_size} tokens per query"

    def expected_density(self, tokens: int) -> tuple[float, str]:
        return self.density(tokens), "exact: it depends only on the length"

    def density(self, seq_len: int) -> float:
        """Returns the density, which does not depend on the queries."""
        size, pairs = self.chunk_size, 0
        for chunk in range(-(-seq_len // size)):
            tokens = min(size, seq_len - chunk * size)
            pairs += tokens * (tokens + 1) // 2 + tokens * min(chunk, self.top_k - 1) * size
        return pairs / (seq_len * (seq_len + 1) // 2)

    def scoring_share(self) -> float:
        # One product per query and chunk, of two per pair.
        return 1 / self.chunk_size

    def capacities(self, num_blocks: int, documents: bool = False) -> tuple[int, int]:
        # One bit per query and chunk, and a number per row of blocks; ranks share the rows.
        chunks = -(-num_blocks * self.block_size // self.chunk_size)
        return num_blocks * (self.block_size * -(-chunks // 32) + 1), 0

    def query_copies(self, num_blocks: int) -> int:
        # One for each chunk that a query sees in addition to its own.
        chunks = -(-num_blocks * self.block_size // self.chunk_size)
        return min(self.top_k, chunks) - 1
