"""MoBA: each query selects chunks of keys by their means."""

from mtraining_jax.patterns.base import BlockPattern
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.limits import PositiveInt


@options
class MoBA(BlockPattern):
    """Per token and head, the key chunks with the largest products of query and mean key.

    A query sees its own chunk up to itself, and the `top_k` - 1 complete earlier chunks whose mean
    key has the largest product with it, or all of them if there are fewer. Means are rounded to the
    dtype of the keys; products are fp32. Ties go to the earlier chunk.

    The pairs are exact. A tile of 128 queries has no common list, so the queries that see a chunk
    are gathered and computed together (`pallas_kernels.chunks`). This needs memory for
    `top_k` - 1 copies of the queries and of the output, and for the keys of all ranks.

    In packed sequences, chunks start at document boundaries and queries select chunks of their own
    document, as for the document on its own. Documents of at most `top_k` chunks are dense.

    Causality: strict. The selection of a query depends on itself and on keys before its own chunk.

    Source: MoBA (arXiv 2502.13189), with the defaults of its published code. Its authors train with
    it, and keep the last layers dense.
    """

    density_option = "top_k"

    chunk_size: PositiveInt = 4096
    """Chunk size in tokens; a multiple of block_size."""
    top_k: PositiveInt = 12
    """Maximum number of chunks per query, including its own."""
    block_size: PositiveInt = 128
    """Block size of the kernels in tokens (g)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk_size % self.block_size:
            raise ValueError(
                f"chunk_size={self.chunk_size} must be a multiple of block_size={self.block_size}"
            )

    @property
    def min_sparse_tokens(self) -> int:
        """Documents shorter than this, including padding, are dense in any case."""
        return self.top_k * self.chunk_size + 1

    def select(self, q, k, context):
        from mtraining_jax.selection.scores import chunk_gate

        chunk_blocks = self.chunk_size // self.block_size
        return chunk_gate.select_chunks(q, k, context, self.block_size, chunk_blocks, self.top_k)

    def describe(self) -> str:
        return f"MoBA, {self.top_k} chunks of {self.chunk_size} tokens per query"
