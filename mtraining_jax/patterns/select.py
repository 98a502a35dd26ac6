"""Selection of an index, on one device or on the shards of a sequence."""

from collections.abc import Sequence

import jax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from mtraining_jax.patterns.base import Pattern
from mtraining_jax.selection.context import Selection, SelectionContext
from pallas_kernels import names
from pallas_kernels.index import Index


def select(pattern: Pattern, q: Array, k: Array, context: SelectionContext) -> Selection:
    """Selects an index with a pattern; no gradient flows through it.

    The index has the checkpoint name `names.INDEX`. A rematerialization policy that saves this name
    avoids a second selection.

    Args:
        pattern: any pattern.
        q: [B, n, Hq, D], local queries, after rotary embedding.
        k: [B, n, Hk, D], local keys.
        context: the shards of the sequence.

    Raises:
        UserError: if there are documents, and the pattern does not support them.
        ValueError: if `context.shares` are given for a pattern without a mass fraction.
        TypeError: if the pattern does not return a `Selection`.
    """
    if context.documents is not None:
        pattern.check_documents()
    if context.shares is not None and pattern.kept_share() is None:
        raise ValueError(f"{type(pattern).__name__} has no mass fraction to override with shares")
    selection = pattern.select(*lax.stop_gradient((q, k)), context)
    if not isinstance(selection, Selection):
        raise TypeError(
            f"{type(pattern).__name__}.select returned {type(selection).__name__}; "
            "it must return Selection(index, statistics)"
        )
    leaves, structure = jax.tree.flatten(selection.index)
    leaves = [checkpoint_name(lax.stop_gradient(leaf), names.INDEX) for leaf in leaves]
    return Selection(jax.tree.unflatten(structure, leaves), selection.statistics)


def select_index(
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
    """Selects an index; the arguments are those of `select` and `SelectionContext`."""
    context = SelectionContext(block_ids, num_blocks, tuple(axis_names), scale, backend)
    return select(pattern, q, k, context).index
