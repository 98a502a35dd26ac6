"""The pattern that keeps every pair, computed by the same kernels."""

import dataclasses
from typing import TYPE_CHECKING

from mtraining_jax.limits import check_limits, limited
from mtraining_jax.sparsity.pattern import Choice, Pattern, Shards

if TYPE_CHECKING:
    from jax import Array


@dataclasses.dataclass(frozen=True)
class Dense(Pattern):
    """Every causal pair; with `causal=False` every pair.

    Attributes:
        block_size: tokens on a side of a block.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    also_not_causal = True
    sparse = False

    block_size: limited(int, ge=1) = 128

    def __post_init__(self) -> None:
        check_limits(self)

    def choose(self, q: "Array", k: "Array", shards: Shards) -> Choice:
        """Chooses every pair."""
        from pallas_kernels.index import DenseIndex

        return Choice(DenseIndex(self.block_size, shards.causal))

    def for_documents(self) -> "DenseDocuments":
        """Every causal pair within each document."""
        return DenseDocuments(self.block_size)

    def describe(self) -> str:
        """Its name."""
        return "dense"

    def expected_density(self) -> tuple[float, str]:
        """All of the pairs."""
        return 1.0, "dense"

    def capacities(self, num_blocks: int) -> tuple[int, int]:
        """Nothing is kept."""
        return 0, 0


@dataclasses.dataclass(frozen=True)
class DenseDocuments(Pattern):
    """Every causal pair within each document: what `Dense` is where documents are packed.

    Attributes:
        block_size: tokens on a side of a block.
    """

    by_rows = True
    sparse = False

    block_size: int = 128

    def choose(self, q: "Array", k: "Array", shards: Shards) -> Choice:
        """Chooses every block of a row's document up to the row's own, as bits."""
        import jax.numpy as jnp

        from pallas_kernels.index import BlockMaskIndex

        bits = shards.documents.causal_blocks(shards.block_ids, shards.num_blocks)
        bits = jnp.broadcast_to(bits, (q.shape[0], q.shape[2], *bits.shape[2:]))
        return Choice(BlockMaskIndex(bits, shards.num_blocks, self.block_size))

    def for_documents(self) -> "DenseDocuments":
        """Itself."""
        return self

    def describe(self) -> str:
        """Its name."""
        return "dense within documents"

    def expected_density(self) -> tuple[float, str]:
        """All pairs of the documents."""
        return 1.0, "dense, if each sequence is one document"

    def capacities(self, num_blocks: int) -> tuple[int, int]:
        """A bit for each block; ranks share them."""
        return num_blocks * -(-num_blocks // 32), 0
