"""The base of all options of sparse patterns.

Options import no JAX, so that a configuration can be read and checked without it. The pattern
itself, which selects pairs, is loaded by `PatternOptions.pattern`. Most inherit from their options.
"""

import dataclasses
import importlib
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import Field

from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.limits import NonNegativeInt, PositiveInt


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


class MassFraction(NamedTuple):
    """A pattern's mass fraction, which can be tuned during a run.

    Monotone: raising it never drops a pair.

    Attributes:
        name: name of the field.
        bits: it is rounded to multiples of 2^-bits; at most 30.
    """

    name: str
    bits: int


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


class PatternOptions:
    """The fields of the section `[sparsity]` for one kind of pattern, decorated with `options`.

    The message of a ValueError of `__post_init__` begins with the name of the field.

    Attributes:
        pattern_class: the pattern, as `module:Class`.
        sparse: whether pairs may be skipped at all.
        selects: whether pairs are selected by queries and keys; otherwise recall is not measured,
            and densities are reported under another name.
        density_name: name of the density in what a run prints.
        supports_documents: whether pairs are selected within packed documents; otherwise packed
            documents are rejected.
        budget_field: the field to increase in order to keep more pairs.
    """

    pattern_class: ClassVar[str]
    sparse: ClassVar[bool] = True
    selects: ClassVar[bool] = True
    density_name: ClassVar[str] = "density"
    supports_documents: ClassVar[bool] = False
    budget_field: ClassVar[str] = ""

    block_size: int

    def __post_init__(self) -> None:
        if not hasattr(self, "block_size"):
            raise ValueError(f"{type(self).__name__} lacks the field block_size, tokens per block")
        if self.block_size < 1:  # the field of a user's class may have no limits
            raise ValueError(f"block_size={self.block_size} must be at least 1")

    def pattern(self, model: ModelSizes) -> Any:
        """Returns the `Pattern` for a model; arrays that differ between layers lead with that axis.

        Raises:
            UserError: if a file cannot be read, or the options do not fit the model.
        """
        return self.load_class().from_options(self, model)

    def load_class(self) -> Any:
        """Loads the class of the pattern, and with it JAX."""
        module, _, name = self.pattern_class.partition(":")
        return getattr(importlib.import_module(module), name)

    def check_documents(self) -> None:
        """Raises a UserError if the pattern does not support packed documents."""
        if not self.supports_documents:
            raise UserError(
                f"{type(self).__name__} does not support packed documents; use sampled_rows, "
                "vertical_slash or dense, or set supports_documents = True in a class of your own "
                "that selects within documents"
            )

    def row_sharded(self, documents: bool) -> bool:
        """Whether each rank holds its own rows of an index, with or without packed documents."""
        del documents
        return False

    def for_prompts(self) -> "PatternOptions":
        """Returns the variant for prompts, with the question at the end; unchanged by default."""
        return self

    def mass_fraction(self) -> MassFraction | None:
        """The mass fraction that `SelectionContext.mass_fraction` may override, or None."""
        return None

    def describe(self) -> str:
        """Describes the pattern in a few words, for the banner of a run."""
        return type(self).__name__

    def more_pairs(self) -> str:
        """Advice on which field to change to keep more pairs, and so more attention mass."""
        if not self.budget_field:
            return "change the settings in [sparsity] to keep more pairs"
        return f"increase sparsity.{self.budget_field} = {getattr(self, self.budget_field)}"

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


@options
class DenseOptions(PatternOptions):
    """Dense attention."""

    pattern_class = "mtraining_jax.patterns.dense:Dense"
    supports_documents = True
    sparse = False

    block_size: BlockSize = 128

    def describe(self) -> str:
        return "dense"
