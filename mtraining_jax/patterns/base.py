"""The base of sparse patterns.

A pattern is one class in one file: its fields are the options of `[sparsity]`, and the same object
selects pairs under `jax.jit`. Reading a configuration loads no JAX, so the files in this folder
import what selects only when it is needed: `select` imports scores and rules from
`mtraining_jax.selection`. A pattern is registered in `registry.py` or referenced as
`package.module:Class`; see `examples/strided_pattern.py` for a complete one.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Self

from pydantic import Field, SkipValidation

from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.limits import NonNegativeInt, PositiveInt

if TYPE_CHECKING:
    from jax import Array

    from mtraining_jax.selection.context import Selection, SelectionContext


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """Properties of the model and run that a pattern may depend on.

    Attributes:
        num_layers: L.
        num_heads: query heads, Hq.
        seq_len: S, tokens.
        seed: seed of the run, for random patterns.
    """

    num_layers: int
    num_heads: int
    seq_len: int
    seed: int = 0


class NewTokens(NamedTuple):
    """How a generated token selects key blocks of 128, for all query heads of a key/value head.

    It selects blocks of the first and of the last tokens, and those with at least `share` of the
    mean mass of a block, on average over the heads.
    """

    share: float
    first_tokens: int
    last_tokens: int
    least_mass: float  # lighter blocks are not selected
    dense_below: int  # tokens of a sequence that is shorter attend to all of it


# Fields of several patterns, with their help texts.
BlockSize = Annotated[PositiveInt, Field(description="Block size in tokens (g).")]
ProbeQueries = Annotated[
    PositiveInt,
    Field(description="Number of probe queries at the end of the sequence; at most block_size."),
]
MinSparseTokens = Annotated[
    NonNegativeInt,
    Field(
        description="Documents shorter than this, including padding, use dense attention, since "
        "selection would save little. Has no effect without documents."
    ),
]
# Marks fields that only `bind` or Python sets. `Traced` is an array, or a tracer of it.
NOT_AN_OPTION = Field(exclude=True)
Traced = Annotated[SkipValidation[Any], NOT_AN_OPTION]

_classes: set[type[Pattern]] = set()  # of all patterns that were created


class Pattern:
    """Selects the pairs that attention computes; a frozen dataclass, decorated with `options`.

    A pytree: arrays are the fields in `arrays`, and other fields are static under `jax.jit`. Each
    array has query heads as its leading axis; a pattern for all layers of a model has a layer axis
    before that. The message of a ValueError of `__post_init__` begins with the name of the field.

    Attributes:
        arrays: names of the fields that are arrays; None until `bind`.
        sparse: whether pairs may be skipped at all.
        selects: whether pairs are selected by queries and keys; otherwise recall is not measured,
            and densities are reported under another name.
        density_name: name of the density in what a run prints.
        supports_documents: whether pairs are selected within packed documents; otherwise packed
            documents are rejected.
        supports_bidirectional: whether `select` supports non-causal attention.
        density_option: the option to increase in order to keep more pairs.
    """

    arrays: ClassVar[tuple[str, ...]] = ()
    sparse: ClassVar[bool] = True
    selects: ClassVar[bool] = True
    density_name: ClassVar[str] = "density"
    supports_documents: ClassVar[bool] = False
    supports_bidirectional: ClassVar[bool] = False
    density_option: ClassVar[str] = ""

    block_size: int

    def __new__(cls, *_args: object, **_fields: object) -> Self:
        """Registers the class as a pytree if JAX is loaded."""
        _classes.add(cls)
        if "jax" in sys.modules:
            register_pytrees()
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if not hasattr(self, "block_size"):
            raise ValueError(f"{type(self).__name__} lacks the field block_size, tokens per block")
        if self.block_size < 1:  # the field of a user's class may have no limits
            raise ValueError(f"block_size={self.block_size} must be at least 1")

    def bind(self, model: ModelSizes) -> Pattern:
        """Returns the pattern for a model; arrays that differ between layers lead with that axis.

        Raises:
            UserError: if a file cannot be read, or the options do not fit the model.
        """
        del model
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

    def check_documents(self) -> None:
        """Raises a UserError if the pattern does not support packed documents."""
        if not self.supports_documents:
            raise UserError(
                f"{type(self).__name__} does not support packed documents; use sampled_rows, "
                "vertical_slash or dense, or set supports_documents = True in a class of your own "
                "that selects within documents"
            )

    def sharded_by_query(self, documents: bool) -> bool:
        """Whether each rank holds its own rows of an index, with or without packed documents."""
        del documents
        return False

    def for_prompts(self) -> Self:
        """Returns the variant for prompts, with the question at the end; unchanged by default."""
        return self

    def for_new_tokens(self) -> NewTokens | None:
        """Returns how generated tokens select; None, the default, if they attend to all tokens."""
        return None

    def overridable(self) -> Mapping[str, int]:
        """The option that `SelectionContext.overrides` may set per sequence, if any, and its bits.

        A fraction of attention mass, in units of 2^-bits (at most 30). Monotone: raising it never
        drops a pair.
        """
        return {}

    def describe(self) -> str:
        """Describes the pattern in a few words, for the banner of a run."""
        return type(self).__name__

    def more_pairs(self) -> str:
        """Advice on which field to change to keep more pairs, and so more attention mass."""
        if not self.density_option:
            return "change the settings in [sparsity] to keep more pairs"
        return f"increase sparsity.{self.density_option} = {getattr(self, self.density_option)}"

    def blocks(self, tokens: int) -> int:
        """Returns the number of blocks of some tokens."""
        return -(-tokens // self.block_size)

    def shortest_sparse_document(self) -> int:
        """Returns the tokens below which documents use dense attention; 0 if none does so."""
        return getattr(self, "min_sparse_tokens", 0) if self.selects and self.sparse else 0

    def most_documents(self, num_blocks: int) -> int:
        """Returns how many documents of `min_sparse_tokens` fit into NB blocks, at least 1."""
        least = self.blocks(getattr(self, "min_sparse_tokens", 0))
        return max(num_blocks // max(least, 1), 1)


class BlockPattern(Pattern):
    """Common base of patterns with an index of rows of blocks: each rank holds its own rows."""

    supports_documents = True

    def sharded_by_query(self, documents: bool) -> bool:
        return True


def register_pytrees() -> None:
    """Registers the classes of all patterns so far as pytrees. Loads JAX."""
    for cls in tuple(_classes):
        _register(cls)


@functools.cache
def _register(cls: type[Pattern]) -> None:
    import jax

    if not cls.arrays:
        jax.tree_util.register_static(cls)
        return
    fields: Any = cls
    static = [x.name for x in dataclasses.fields(fields) if x.name not in cls.arrays]
    jax.tree_util.register_dataclass(cls, data_fields=list(cls.arrays), meta_fields=static)
