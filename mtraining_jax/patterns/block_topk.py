"""Block top-k: a fixed number of key blocks per query block, by products of means."""

from jax import Array

from mtraining_jax.patterns.base import Pattern
from mtraining_jax.patterns.options.rows import BlockTopKOptions
from mtraining_jax.selection.checks import check_selection
from mtraining_jax.selection.context import Selection, SelectionContext
from mtraining_jax.selection.scores.chunk_gate import best_blocks
from mtraining_jax.utils.fields import options
from pallas_kernels.index import BlockMaskIndex


@options
class BlockTopK(Pattern, BlockTopKOptions):
    """Per head and query block, the key blocks with the largest products of block means.

    Each query block keeps its own key block and the best `top_blocks` - 1 earlier ones, by the
    product of mean query and mean key. Means are rounded to the dtype of q and k, products are
    fp32. Ties go to the earlier block.

    This is MoBA's rule (`MoBA`) with a joint selection for all queries of a block. MInference
    (arXiv 2407.02490) calls it block-sparse, with 100 blocks of 64 tokens and without always
    keeping the query's own block. The quality reported in either publication does not apply to this
    pattern.

    Causality: the selection depends on all queries of a block, so a query can be influenced by up
    to `block_size` - 1 later tokens of its own block.
    """

    def select(self, q: Array, k: Array, context: SelectionContext) -> Selection:
        check_selection(q, k, context, self.block_size)
        bits = best_blocks(q, k, context, min(self.top_blocks, context.num_blocks))
        if context.documents.packed:  # blocks without a document compute nothing
            bits &= context.documents.causal_blocks(context.block_ids, context.num_blocks)
        return Selection(BlockMaskIndex(bits, context.num_blocks, self.block_size))
