"""Key blocks by exact attention mass: an upper bound for selection of blocks by mass."""

import dataclasses
from typing import TYPE_CHECKING

from mtraining_jax.patterns.row_pattern import RowPattern
from mtraining_jax.selection.context import SelectionContext

if TYPE_CHECKING:
    from jax import Array


@dataclasses.dataclass(frozen=True)
class ExactRows(RowPattern):
    """Key blocks by the exact mean softmax mass of all queries of each block over all keys.

    A reference for cheaper scores. It costs half of a dense forward pass (the products of queries
    and keys), so it pays off in training only if forward and backward save more than that.
    """

    def scores(self, q: "Array", k: "Array", context: SelectionContext) -> "Array":
        from mtraining_jax.patterns.sampled_rows import exact_masses

        return exact_masses(q, k, context, self.block_size, self.block_size)

    def scoring_share(self) -> float:
        # One of the two products of a forward pass.
        return 0.5

    def softmax_share(self) -> float:
        return 1.0

    def describe(self) -> str:
        return f"exact rows: exact mass of each key block, {self.rule_in_words()}"
