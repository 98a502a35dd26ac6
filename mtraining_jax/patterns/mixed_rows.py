"""Key blocks by two cheap scores: antidiagonals of all queries, and exact sampled queries."""

import dataclasses
from typing import TYPE_CHECKING

from mtraining_jax.patterns.xattention import XAttention
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.utils.limits import PositiveInt, check_at_most

if TYPE_CHECKING:
    from jax import Array


@dataclasses.dataclass(frozen=True)
class MixedRows(XAttention):
    """Key blocks by the mean of the scores of `XAttention` and `SampledRows`.

    Antidiagonals cover every query but blur individual pairs of tokens; sampled queries are exact
    but miss what the others attend to. Costs 1/(2 s) + r / (2 g) of a dense forward pass.

    Attributes:
        probe_queries_per_block: Number of probe queries per query block (r); at most block_size.
    """

    probe_queries_per_block: PositiveInt = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_most(self, "probe_queries_per_block", "block_size")

    def scores(self, q: "Array", k: "Array", context: SelectionContext) -> "Array":
        from mtraining_jax.patterns.sampled_rows import exact_masses

        strides = super().scores(q, k, context)
        # Products with a power of two are exact, so contraction cannot change the sum.
        return (
            strides * 0.5
            + exact_masses(q, k, context, self.block_size, self.probe_queries_per_block) * 0.5
        )

    def scoring_share(self) -> float:
        return super().scoring_share() + self.probe_queries_per_block / (2 * self.block_size)

    def softmax_share(self) -> float:
        # r / g; the sums along antidiagonals are few.
        return self.probe_queries_per_block / self.block_size

    def describe(self) -> str:
        return (
            f"mixed rows: XAttention with stride {self.stride} and {self.probe_queries_per_block} probe "
            f"queries per block, {self.rule_in_words()}"
        )
