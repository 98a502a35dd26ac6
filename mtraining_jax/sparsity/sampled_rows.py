"""Key blocks by the exact attention of some rows of each block of queries."""

import dataclasses
from typing import TYPE_CHECKING

from mtraining_jax.limits import check_at_most, limited
from mtraining_jax.sparsity.pattern import Shards
from mtraining_jax.sparsity.row_pattern import RowPattern

if TYPE_CHECKING:
    from jax import Array

    from pallas_kernels.index import BlockMaskIndex


@dataclasses.dataclass(frozen=True)
class SampledRows(RowPattern):
    """Key blocks by the exact softmax of some queries of each block over all keys, their mean.

    With r queries of a block of g, those at the places (i+1) g / r - 1, rounded down: evenly
    spread, the last one of the block among them. It costs r / (2 g) of a dense forward pass. What
    only other queries look at, it misses. Where padding follows inside a block, g is the number of
    its real queries: the last rows of a prompt are those that look for its answer.

    Lists of blocks spend a whole block on a single key. With `columns`, the keys that most of 128
    queries all over the sequence look at, far from themselves, are seen by all later queries
    whether their blocks are listed or not, and lists are chosen by the mass that these keys leave.

    Attributes:
        sampled_rows: r, queries of each block that are looked at; at most `block_size`.
        columns: most key columns of a head, beside the lists. Multiples of 128 cost kernels least.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    sampled_rows: limited(int, ge=1) = 16
    columns: limited(int, ge=0) = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_most(self, "sampled_rows", "block_size")

    def scores(self, q: "Array", k: "Array", shards: Shards) -> "Array":
        return exact_masses(q, k, shards, self.block_size, self.sampled_rows)

    def index(self, q: "Array", k: "Array", shards: Shards) -> "BlockMaskIndex":
        if not self.columns:
            return super().index(q, k, shards)
        from mtraining_jax.sparsity import row_columns
        from mtraining_jax.sparsity.row_rule import kept_blocks
        from pallas_kernels.index import BlockMaskIndex

        rule = self.rule(shards)
        tokens = row_columns.heaviest_columns(q, k, shards, self.block_size, self.columns, rule)
        rows, places = samples(q, shards, self.block_size, self.sampled_rows)
        scores, beside = row_columns.masses_without(
            rows, k, places, tokens, shards, self.block_size, like=q
        )
        bits = kept_blocks(scores, shards.block_ids, rule, beside=beside)
        index = BlockMaskIndex(bits, shards.num_blocks, self.block_size)
        return index.with_columns(tokens, shards.block_ids)

    def for_documents(self) -> "SampledRows":
        """The pattern itself; with columns, those of each document."""
        if not self.columns:
            return self
        from mtraining_jax.sparsity.document_sampled_rows import DocumentSampledRows

        fields = dataclasses.fields(self)
        return DocumentSampledRows(**{field.name: getattr(self, field.name) for field in fields})

    def scoring_share(self) -> float:
        """r / (2 g)."""
        return self.sampled_rows / (2 * self.block_size)

    def softmax_share(self) -> float:
        """r / g."""
        return self.sampled_rows / self.block_size

    def capacities(self, num_blocks: int) -> tuple[int, int]:
        numbers, _ = super().capacities(num_blocks)
        marks = num_blocks * -(-self.block_size // 32) if self.columns else 0
        return numbers + marks, min(self.columns, num_blocks * self.block_size)

    def describe(self) -> str:
        """How many rows, tau, and how many columns."""
        beside = f", and {self.columns} columns" if self.columns else ""
        return (
            f"exact attention of {self.sampled_rows} queries of each block, "
            f"{self.rule_in_words()}{beside}"
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
            Of a block that ends with padding, its real queries are counted as g; if they are fewer
            than r, some count several times.

    Returns:
        fp32 [B, Hq, n/g, NB].
    """
    from mtraining_jax.sparsity import row_scores

    rows, places = samples(q, shards, block_size, sampled)
    return row_scores.block_masses(
        rows, by_blocks(k, block_size), places, shards.first_blocks(shards.block_ids),
        scale=shards.scale_for(q.shape[-1]), like=q, backend=shards.backend,
    )


def samples(
    q: "Array", shards: Shards, block_size: int, sampled: int
) -> "tuple[Array, Array]":
    """Some queries of each block; the arguments are those of `exact_masses`.

    Returns:
        The queries [B, Hq, n/g, r, D], and int32 [B or 1, n/g, r], their global positions; -1 for
        one that looks at nothing.
    """
    import jax.numpy as jnp

    numbers = jnp.arange(1, sampled + 1, dtype=jnp.int32)
    first = shards.block_ids[:, None] * block_size
    real, ends = block_size, shards.ends(shards.block_ids, block_size)
    if ends is not None:
        real = jnp.clip(ends[..., None] - first, 0, block_size)
    # [B or 1, n/g, r]; -1 where a block has no real query, or fewer than r.
    within = jnp.broadcast_to(
        numbers * real // sampled - 1, (1 if ends is None else len(ends), len(first), sampled)
    )
    places = jnp.where(within < 0, -1, first + within)
    of_blocks = by_blocks(q, block_size)
    rows = jnp.take_along_axis(of_blocks, within[:, None, :, :, None], axis=3, mode="clip")
    return rows, places


def by_blocks(x: "Array", block_size: int) -> "Array":
    """[B, n, H, D] as [B, H, n/g, g, D]."""
    x = x.reshape(x.shape[0], -1, block_size, *x.shape[2:])
    return x.transpose(0, 3, 1, 2, 4)
