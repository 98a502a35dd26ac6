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

    def describe(self) -> str:
        """Its name."""
        return "dense"

    def expected_density(self) -> tuple[float, str]:
        """All of the pairs."""
        return 1.0, "dense"

    def capacities(self, num_blocks: int) -> tuple[int, int]:
        """Nothing is kept."""
        return 0, 0
