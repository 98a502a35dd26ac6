"""Key blocks by the exact attention of some rows of each block of queries."""

import dataclasses
from typing import TYPE_CHECKING

from mtraining_jax.limits import check_at_most, limited
from mtraining_jax.sparsity.pattern import Shards
from mtraining_jax.sparsity.row_pattern import RowPattern

if TYPE_CHECKING:
    from jax import Array


@dataclasses.dataclass(frozen=True)
class SampledRows(RowPattern):
    """Key blocks by the exact softmax of some queries of each block over all keys, their mean.

    With r queries of a block of g, those at the places (i+1) g / r - 1, rounded down: evenly
    spread, the last one of the block among them. It costs r / (2 g) of a dense forward pass. What
    only other queries look at, it misses.

    Attributes:
        sampled_rows: r, queries of each block that are looked at; at most `block_size`.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    sampled_rows: limited(int, ge=1) = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_most(self, "sampled_rows", "block_size")

    def scores(self, q: "Array", k: "Array", shards: Shards) -> "Array":
        """As `RowPattern.scores`: softmax masses of the sampled queries, their mean."""
        return exact_masses(q, k, shards, self.block_size, self.sampled_rows)

    def scoring_share(self) -> float:
        """r / (2 g)."""
        return self.sampled_rows / (2 * self.block_size)

    def describe(self) -> str:
        """How many rows, and tau."""
        return (
            f"exact attention of {self.sampled_rows} queries of each block, "
            f"{self.rule_in_words()}"
        )


def exact_masses(
    q: "Array", k: "Array", shards: Shards, block_size: int, sampled: int
) -> "Array":
    """Softmax mass that some queries of each block give to key blocks, their mean.

    Args:
        q: [B, n, Hq, D], local queries.
        k: [B, S, Hk, D], all keys, in the order of the sequence.
        shards: where the queries lie.
        block_size: g.
        sampled: r, how many of the g queries of a block, evenly spread, the last one among them.

    Returns:
        fp32 [B, Hq, n/g, NB].
    """
    import jax.numpy as jnp
    import numpy as np

    from mtraining_jax.sparsity import row_scores

    within = np.arange(1, sampled + 1) * block_size // sampled - 1

    def blocks(x: "Array") -> "Array":  # [B, n, H, D] -> [B, H, n/g, g, D]
        x = x.reshape(x.shape[0], -1, block_size, *x.shape[2:])
        return x.transpose(0, 3, 1, 2, 4)

    places = shards.block_ids[:, None] * block_size + jnp.asarray(within, jnp.int32)
    if shards.valid_len is not None:
        places = jnp.where(places < shards.valid_len, places, -1)
    scale = shards.scale_for(q.shape[-1])
    return row_scores.block_masses(
        blocks(q)[:, :, :, within], blocks(k), places, scale=scale, like=q,
        backend=shards.backend,
    )
