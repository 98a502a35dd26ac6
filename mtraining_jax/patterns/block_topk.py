"""Block top-k: a fixed number of key blocks per query block, by products of means."""

import dataclasses
from typing import TYPE_CHECKING

from mtraining_jax.patterns.base import Pattern
from mtraining_jax.selection.context import Selection, SelectionContext
from mtraining_jax.utils.limits import PositiveInt, check_limits

if TYPE_CHECKING:
    from jax import Array


@dataclasses.dataclass(frozen=True)
class BlockTopK(Pattern):
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

    Attributes:
        top_blocks: Maximum number of key blocks per query block, including its own.
        block_size: Block size in tokens (g).
    """

    by_rows = True
    reads_documents = True

    top_blocks: PositiveInt = 32
    block_size: PositiveInt = 128

    def __post_init__(self) -> None:
        check_limits(self)

    @property
    def min_sparse_tokens(self) -> int:
        """Documents shorter than this, including padding, are dense in any case."""
        return self.top_blocks * self.block_size + 1

    def more_pairs(self) -> str:
        return f"increase sparsity.top_blocks = {self.top_blocks}"

    def select(self, q: "Array", k: "Array", context: SelectionContext) -> Selection:
        from mtraining_jax.selection.checks import check_selection
        from mtraining_jax.selection.scores.chunk_gate import chosen_blocks
        from pallas_kernels.index import BlockMaskIndex

        check_selection(q, k, context, self.block_size)
        most = min(self.top_blocks, context.num_blocks)
        bits = chosen_blocks(q, k, context, most)
        if context.documents is not None:  # blocks without a document compute nothing
            bits &= context.documents.causal_blocks(context.block_ids, context.num_blocks)
        return Selection(BlockMaskIndex(bits, context.num_blocks, self.block_size))

    def describe(self) -> str:
        return f"block top-k, {self.top_blocks} key blocks per query block, scored by block means"

    def expected_density(self, tokens: int) -> tuple[float, str]:
        rows = -(-tokens // self.block_size)
        tiles = sum(min(row, self.top_blocks - 1) + 0.5 for row in range(rows))
        return tiles / (rows * rows / 2), "exact: it depends only on the length"

    def scoring_share(self) -> float:
        # 1/g^2, for one of two products.
        return 0.5 / self.block_size**2

    def capacities(self, num_blocks: int, documents: bool = False) -> tuple[int, int]:
        # One bit per block; ranks share the rows.
        return num_blocks * -(-num_blocks // 32), 0
