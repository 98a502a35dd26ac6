"""The interface of sparse patterns: settings, selection of pairs, and description.

A pattern is one file, registered in `registry.py` or referenced as `package.module:Class`; see
`examples/strided_pattern.py` for a complete one. This file imports no JAX, so that a configuration
can be read and checked before JAX is loaded.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from mtraining_jax.cost_model.density import density_of_vertical_slash
from mtraining_jax.selection.context import Selection, SelectionContext
from mtraining_jax.utils.errors import UserError

if TYPE_CHECKING:
    from jax import Array


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


class KeptShare(NamedTuple):
    """A pattern's mass fraction, which can be tuned during a run.

    Monotone: raising it never drops a pair.

    Attributes:
        name: name of the field.
        bits: it is rounded to multiples of 2^-bits; at most 30.
    """

    name: str
    bits: int


class Settings:
    """The fields of the section `[sparsity]` for one kind of pattern: a frozen dataclass.

    Field types may carry limits (`mtraining_jax.utils.limits`); "Attributes:" of the docstring is
    their help text. The message of a ValueError begins with the name of the field.

    Attributes:
        block_size: Block size in tokens (g).
        selects: whether pairs are selected by queries and keys; otherwise recall is not measured,
            and densities are reported under another name.
        density_name: name of the density in what a run prints.
        sparse: whether pairs may be skipped at all.
        by_rows: whether its indices are `by_rows`: each rank of a sequence holds its own rows.
            A pattern whose answer depends on documents overrides `row_sharded`.
        reads_documents: whether `select` selects within `SelectionContext.documents`; otherwise packed
            documents are rejected.
    """

    block_size: int
    sparse: ClassVar[bool] = True
    by_rows: ClassVar[bool] = False
    reads_documents: ClassVar[bool] = False
    selects: ClassVar[bool] = True
    density_name: ClassVar[str] = "density"

    def pattern(self, model: ModelSizes) -> "Pattern":
        """Returns the pattern for a model; arrays that differ between layers lead with that axis.

        Raises:
            UserError: if a file cannot be read, or the settings do not fit the model.
        """
        raise NotImplementedError(f"{type(self).__name__}.pattern")

    def check_documents(self) -> None:
        """Raises a UserError if the pattern does not support packed documents."""
        if not self.reads_documents:
            raise UserError(
                f"{type(self).__name__} does not support packed documents; use sampled_rows, "
                "vertical_slash or dense"
            )

    def row_sharded(self, documents: bool) -> bool:
        """Whether indices are `by_rows`, for sequences with or without packed documents."""
        del documents
        return self.by_rows

    def for_prompts(self) -> "Settings":
        """Returns the variant for prompts, with the question at the end; unchanged by default."""
        return self

    def kept_share(self) -> KeptShare | None:
        """The mass fraction that `SelectionContext.shares` may override, or None."""
        return None

    def describe(self) -> str:
        """Describes the pattern in a few words, for the banner of a run."""
        return type(self).__name__

    def expected_density(self, tokens: int) -> tuple[float, str]:
        """Returns the density to expect of sequences or documents of some tokens, and why."""
        why = "assumed by length, as measured with SmolLM2-135M and, at 512K, by MTraining"
        return density_of_vertical_slash(tokens), why

    def takes_selection(self) -> bool:
        """Whether a step selects an index, used or not. For time estimates, as the next two."""
        return self.selects

    def scoring_share(self) -> float:
        """FLOP of scoring pairs over those of a dense forward pass; 0 if probe queries are few."""
        return 0.0

    def softmax_share(self) -> float:
        """Fraction of all pairs whose scores go through a softmax, which may be the slower part."""
        return 0.0

    def more_pairs(self) -> str:
        """Advice on which field to change to keep more pairs, and so more attention mass."""
        return "change the settings in [sparsity] to keep more pairs"

    def capacities(self, num_blocks: int, documents: bool = False) -> tuple[int, int]:
        """Returns the int32 numbers an index stores per head, and how many of them are columns.

        For memory estimates, of sequences of NB blocks with or without packed documents. Columns
        are keys gathered per head. The default is a `BlockSparseIndex` with room for every block.
        """
        del documents
        return 2 * num_blocks * (num_blocks + 1), 0

    def query_copies(self, num_blocks: int) -> int:
        """Number of copies of all queries and outputs that a layer needs, for memory estimates."""
        del num_blocks
        return 0


class Pattern(Settings):
    """Selects the pairs that attention computes.

    A frozen dataclass, static under `jax.jit`. A pattern with arrays lists them in `arrays` and is
    then a pytree. Each array has query heads as its leading axis; a pattern for all layers of a
    model has a layer axis before that.

    Attributes:
        arrays: names of the fields that are arrays.
        also_not_causal: whether `select` supports non-causal attention.
    """

    arrays: ClassVar[tuple[str, ...]] = ()
    also_not_causal: ClassVar[bool] = False

    def __new__(cls, *_args, **_fields):
        """Registers a pattern with arrays as a pytree when its first instance is created."""
        if cls.arrays:
            _register(cls)
        return super().__new__(cls)

    def pattern(self, model: ModelSizes) -> "Pattern":
        return self

    def select(self, q: "Array", k: "Array", context: SelectionContext) -> Selection:
        """Selects the pairs to compute, per batch entry and query head.

        Called by `patterns.select`, inside `jax.shard_map` on the shards of a sequence or on one
        device. All ranks must get the same index, or their own rows of it, for any number of ranks.

        Args:
            q: [B, n, Hq, D], local queries, after rotary embedding.
            k: [B, n, Hk, D], local keys in the same dtype; Hk divides Hq.
            context: the shards of the sequence.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must implement select(self, q, k, context)"
        )


def blocks_of(tokens: int, block_size: int) -> int:
    """Returns the number of blocks of some tokens."""
    return -(-tokens // block_size)


def most_documents(num_blocks: int, least_blocks: int) -> int:
    """Returns how many documents of `least_blocks` blocks fit into NB blocks, at least 1."""
    return max(num_blocks // max(least_blocks, 1), 1)


@functools.cache
def _register(cls: type) -> None:
    import jax

    static = [field.name for field in dataclasses.fields(cls) if field.name not in cls.arrays]
    jax.tree_util.register_dataclass(cls, data_fields=list(cls.arrays), meta_fields=static)
