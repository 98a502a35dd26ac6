"""A fixed number of key blocks for each block of queries, by products of means."""

import dataclasses
from typing import TYPE_CHECKING

from mtraining_jax.limits import check_limits, limited
from mtraining_jax.sparsity.pattern import Choice, Pattern, Shards

if TYPE_CHECKING:
    from jax import Array


@dataclasses.dataclass(frozen=True)
class BlockTopK(Pattern):
    """Per head and block of queries, the key blocks whose means have the largest products with it.

    Each block of queries keeps its own key block and the `top_blocks` - 1 best of those before it,
    by the product of the mean query with the mean key. Means are rounded to the dtype of q and k,
    products are fp32. Of equal products the earlier block comes first.

    This is what MoBA's rule (`MoBA`) becomes where all queries of a block choose together, and
    what MInference (arXiv 2407.02490) calls block-sparse, with blocks of 64 and 100 of them, where
    not even the own one is certain. Neither publication's quality tells that of this pattern.

    Causality: which blocks are computed depends on all queries of the row, so a query can be
    influenced by the up to `block_size` - 1 tokens of its own block that come after it.

    Attributes:
        top_blocks: key blocks of each block of queries at most, its own among them.
        block_size: g, tokens on a side of a block.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    by_rows = True

    top_blocks: limited(int, ge=1) = 32
    block_size: limited(int, ge=1) = 128

    def __post_init__(self) -> None:
        check_limits(self)

    @property
    def dense_below(self) -> int:
        """Documents of fewer tokens than this, padding included, have all of their pairs."""
        return self.top_blocks * self.block_size + 1

    def more_pairs(self) -> str:
        """The field that more pairs follow from."""
        return f"sparsity.top_blocks = {self.top_blocks} may be larger"

    def choose(self, q: "Array", k: "Array", shards: Shards) -> Choice:
        """Chooses the local rows."""
        from mtraining_jax.sparsity.checks import check_choice
        from mtraining_jax.sparsity.chunk_gate import chosen_blocks
        from pallas_kernels.index import BlockMaskIndex

        check_choice(q, k, shards, self.block_size)
        most = min(self.top_blocks, shards.num_blocks)
        bits = chosen_blocks(q, k, shards, most)
        if shards.documents is not None:  # blocks of none compute nothing
            bits &= shards.documents.causal_blocks(shards.block_ids, shards.num_blocks)
        return Choice(BlockMaskIndex(bits, shards.num_blocks, self.block_size))

    def for_documents(self) -> "BlockTopK":
        """The pattern itself: each block of queries chooses in its own document."""
        return self

    def describe(self) -> str:
        """The number of blocks."""
        return f"{self.top_blocks} key blocks of each block of queries, by their means"

    def expected_density(self, tokens: int) -> tuple[float, str]:
        """Counted, as it depends on the length alone."""
        rows = -(-tokens // self.block_size)
        tiles = sum(min(row, self.top_blocks - 1) + 0.5 for row in range(rows))
        return tiles / (rows * rows / 2), "counted: it depends on the length alone"

    def scoring_share(self) -> float:
        """1/g^2, of one of two products."""
        return 0.5 / self.block_size**2

    def capacities(self, num_blocks: int) -> tuple[int, int]:
        """A bit for each block; ranks share them."""
        return num_blocks * -(-num_blocks // 32), 0
