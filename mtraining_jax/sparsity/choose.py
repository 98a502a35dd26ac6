"""One choice of an index, on one device or on shards of a sequence."""

from collections.abc import Sequence

import jax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from mtraining_jax.sparsity.pattern import Choice, Pattern, Shards
from pallas_kernels import names
from pallas_kernels.index import Index


def choose(pattern: Pattern, q: Array, k: Array, shards: Shards) -> Choice:
    """What a pattern chooses; no gradient flows through it, and its index carries `names.INDEX`.

    A rematerialisation policy that saves this name makes the recomputation reuse the index.

    Args:
        pattern: any.
        q: [B, n, Hq, D], local queries, rotary embedding applied.
        k: [B, n, Hk, D], local keys.
        shards: where they lie in the sequence.

    Raises:
        ValueError: if `shards.shares` are for a pattern that keeps no share of mass.
        TypeError: if the pattern returns something else.
    """
    if shards.shares is not None and pattern.kept_share() is None:
        raise ValueError(f"{type(pattern).__name__} keeps no share of mass that could be given")
    choice = pattern.choose(*lax.stop_gradient((q, k)), shards)
    if not isinstance(choice, Choice):
        raise TypeError(
            f"{type(pattern).__name__}.choose returned {type(choice).__name__}: "
            "Choice(index, statistics) is needed"
        )
    leaves, structure = jax.tree.flatten(choice.index)
    leaves = [checkpoint_name(lax.stop_gradient(leaf), names.INDEX) for leaf in leaves]
    return Choice(jax.tree.unflatten(structure, leaves), choice.statistics)


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
    """The index that a pattern chooses; the arguments are those of `choose` and `Shards`."""
    shards = Shards(block_ids, num_blocks, tuple(axis_names), scale, backend)
    return choose(pattern, q, k, shards).index
