"""The interface of sparse patterns, and selection with one.

A pattern is one class in one file: its fields, and how it selects pairs. It is registered in
`registry.py` or referenced as `package.module:Class`; see `examples/strided_pattern.py` for a
complete one.
"""

import functools
import inspect
from collections.abc import Sequence
from typing import ClassVar, Self

import jax
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from pydantic import SkipValidation

from mtraining_jax.patterns.options.base import ModelSizes, PatternOptions
from mtraining_jax.selection.context import Selection, SelectionContext
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import fields_of
from pallas_kernels import names
from pallas_kernels.index import Index

# A field that is an array, or a tracer of it.
Traced = SkipValidation[Array | np.ndarray]


class Pattern(PatternOptions):
    """Selects the pairs that attention computes.

    A frozen dataclass, and a pytree: arrays are the fields in `arrays`, and other fields are static
    under `jax.jit`. Each array has query heads as its leading axis; a pattern for all layers of a
    model has a layer axis before that.

    Attributes:
        arrays: names of the fields that are arrays.
        supports_bidirectional: whether `select` supports non-causal attention.
    """

    arrays: ClassVar[tuple[str, ...]] = ()
    supports_bidirectional: ClassVar[bool] = False

    def __new__(cls, *_args: object, **_fields: object) -> Self:
        """Registers a pattern as a pytree when its first instance is created."""
        _register(cls)
        return super().__new__(cls)

    @classmethod
    def from_options(cls, options: PatternOptions, model: ModelSizes) -> "Pattern":
        """Returns the pattern with the values of its options."""
        del model
        return cls(**{name: getattr(options, name) for name in fields_of(cls)})

    def pattern(self, model: ModelSizes) -> "Pattern":
        return self

    def select(self, q: Array, k: Array, context: SelectionContext) -> Selection:
        """Selects the pairs to compute, per batch entry and query head.

        Called by `select_pairs`, inside `jax.shard_map` on the shards of a sequence or on one
        device. All ranks must get the same index, or their own rows of it, for any number of ranks.

        Args:
            q: [B, n, Hq, D], local queries, after rotary embedding.
            k: [B, n, Hk, D], local keys in the same dtype; Hk divides Hq.
            context: the shards of the sequence.
        """
        raise UserError(f"{type(self).__name__} must implement select(self, q, k, context)")


@functools.cache
def _register(cls: type[Pattern]) -> None:
    if not cls.arrays:
        jax.tree_util.register_static(cls)
        return
    static = [name for name in fields_of(cls) if name not in cls.arrays]
    jax.tree_util.register_dataclass(cls, data_fields=list(cls.arrays), meta_fields=static)


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
        ValueError: if a mass fraction is given for a pattern without one.
    """
    if context.documents.packed:
        pattern.check_documents()
    if context.mass_fraction is not None and pattern.mass_fraction() is None:
        raise ValueError(f"{type(pattern).__name__} has no mass fraction to override")
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
