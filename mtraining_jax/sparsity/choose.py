"""One choice of an index, on one device or on shards of a sequence."""

from collections.abc import Sequence

from jax import Array

from mtraining_jax.sparsity.pattern import Pattern, Shards
from pallas_kernels.index import Index


def choose_index(
    q: Array,
    k: Array,
    pattern: Pattern,
    *,
    block_ids: Array,
    num_blocks: int,
    axis_names: Sequence[str] = (),
    scale: float | None = None,
    backend: str | None = None,
) -> Index:
    """The index that a pattern chooses; see `Pattern.choose` and `Shards` for the arguments."""
    shards = Shards(block_ids, num_blocks, tuple(axis_names), scale, backend)
    return pattern.choose(q, k, shards).index
