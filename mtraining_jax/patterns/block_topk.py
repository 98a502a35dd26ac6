"""Block top-k: a fixed number of key blocks per query block, by products of means."""

from mtraining_jax.patterns.base import BlockPattern, BlockSize
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.limits import PositiveInt


@options
class BlockTopK(BlockPattern):
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

    density_option = "top_blocks"

    top_blocks: PositiveInt = 32
    """Maximum number of key blocks per query block, including its own."""
    block_size: BlockSize = 128

    @property
    def min_sparse_tokens(self) -> int:
        """Documents shorter than this, including padding, are dense in any case."""
        return self.top_blocks * self.block_size + 1

    def select(self, q, k, context):
        from mtraining_jax.selection.scores import chunk_gate

        return chunk_gate.select_blocks(q, k, context, self.block_size, self.top_blocks)

    def describe(self) -> str:
        return f"block top-k, {self.top_blocks} key blocks per query block, scored by block means"
