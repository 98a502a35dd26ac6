"""MoBA: each query selects chunks of keys by their means."""

import jax.numpy as jnp
from jax import Array

from mtraining_jax.patterns.base import Pattern
from mtraining_jax.patterns.options.rows import MoBAOptions
from mtraining_jax.selection.checks import check_selection
from mtraining_jax.selection.context import Selection, SelectionContext
from mtraining_jax.selection.scores.chunk_gate import best_chunks
from mtraining_jax.utils.fields import options
from pallas_kernels.index import TokenChunksIndex


@options
class MoBA(Pattern, MoBAOptions):
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

    def select(self, q: Array, k: Array, context: SelectionContext) -> Selection:
        check_selection(q, k, context, self.block_size)
        blocks = self.chunk_size // self.block_size
        most = min(self.top_k, -(-context.num_blocks // blocks))
        words = best_chunks(q, k, context, blocks, most)
        first = context.first_blocks(context.block_ids)
        if first is not None:
            first = jnp.broadcast_to(first[:, None], words.shape[:3])
        return Selection(
            TokenChunksIndex(words, context.num_blocks, blocks, most, self.block_size, first)
        )
