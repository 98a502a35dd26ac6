"""Key blocks by their exact attention mass: the best that a choice of blocks by mass can do."""

import dataclasses
from typing import TYPE_CHECKING

from mtraining_jax.sparsity.pattern import Shards
from mtraining_jax.sparsity.row_pattern import RowPattern

if TYPE_CHECKING:
    from jax import Array


@dataclasses.dataclass(frozen=True)
class ExactRows(RowPattern):
    """Key blocks by the exact softmax of all queries of each block over all keys, their mean.

    A yardstick for cheaper scores. It costs half of a dense forward pass (the products of queries
    and keys), so it pays in training only where forward and backward save more than that.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    def scores(self, q: "Array", k: "Array", shards: Shards) -> "Array":
        from mtraining_jax.sparsity.sampled_rows import exact_masses

        return exact_masses(q, k, shards, self.block_size, self.block_size)

    def scoring_share(self) -> float:
        """One of a forward pass's two products."""
        return 0.5

    def softmax_share(self) -> float:
        """All of them."""
        return 1.0

    def describe(self) -> str:
        """What is exact, and tau."""
        return f"exact mass of each block, {self.rule_in_words()}"
