"""Selection of an index with a pattern."""

import inspect
from collections.abc import Sequence

import jax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from mtraining_jax.patterns.base import Pattern, register_pytrees
from mtraining_jax.selection.context import Selection, SelectionContext
from mtraining_jax.utils.errors import UserError
from pallas_kernels import names
from pallas_kernels.index import Index

register_pytrees()  # of patterns that were created before JAX was loaded


def select_pairs(pattern: Pattern, q: Array, k: Array, context: SelectionContext) -> Selection:
    """Selects an index with a pattern; no gradient flows through it.

    The index has the checkpoint name `names.INDEX`. A rematerialization policy that saves this name
    avoids a second selection.

    Args:
        pattern: any pattern.
        q, k, context: as in `Pattern.select`.

    Raises:
        UserError: if there are documents, and the pattern does not support them, or if its
            `select` has other parameters or does not return a `Selection`.
        ValueError: if an option is overridden that the pattern reads only from its fields.
    """
    if context.documents.packed:
        pattern.check_documents()
    if unknown := context.overrides.keys() - pattern.overridable():
        names_of = ", ".join(sorted(unknown))
        raise ValueError(f"overrides of {names_of} are not supported by {type(pattern).__name__}")
    try:
        inspect.signature(pattern.select).bind(q, k, context)
    except TypeError:
        parameters = ", ".join(inspect.signature(type(pattern).select).parameters)
        raise UserError(
            f"{type(pattern).__name__} has select({parameters}); it must be "
            "select(self, q, k, context)"
        ) from None
    selection = pattern.select(*lax.stop_gradient((q, k)), context)
    name = type(pattern).__name__
    if not isinstance(selection, Selection) or not isinstance(selection.index, Index):
        found = type(selection).__name__
        if isinstance(selection, Selection):
            found += f" of {type(selection.index).__name__}"
        raise UserError(
            f"{name}.select returned {found}; it must return Selection(index, statistics), with an "
            "index such as BlockMaskIndex"
        )
    for field, needed in (("block_size", pattern.block_size), ("causal", context.causal)):
        if (value := getattr(selection.index, field)) != needed:
            raise UserError(
                f"{name}.select returned an index with {field}={value}; {field}={needed} is needed"
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
    """Selects an index; the arguments are those of `select_pairs` and `SelectionContext`."""
    context = SelectionContext(block_ids, num_blocks, tuple(axis_names), scale, backend)
    return select_pairs(pattern, q, k, context).index
