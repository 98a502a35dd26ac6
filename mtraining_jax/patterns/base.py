"""The interface of sparse patterns: settings, selection of pairs, and description.

A pattern is one file, registered in `registry.py` or referenced as `package.module:Class`; see
`examples/strided_pattern.py` for a complete one. This file imports no JAX, so that a configuration
can be read and checked before JAX is loaded.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from mtraining_jax.cost_model.density import density_of_vertical_slash
from mtraining_jax.utils.errors import UserError

if TYPE_CHECKING:
    from jax import Array

    from mtraining_jax.selection.document_blocks import DocumentBlocks
    from pallas_kernels.index import Index


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


@dataclasses.dataclass(frozen=True)
class SelectionContext:
    """The shards of a sequence in a selection, on one device or inside `jax.shard_map`.

    Attributes:
        block_ids: int32 [n/g], global number of each local block of g tokens; each block of the
            sequence is on exactly one rank.
        num_blocks: NB, blocks of the whole sequence.
        axis_names: mesh axes that the sequence is sharded over; () on one device.
        scale: scale of the logits; None is 1/sqrt(D).
        backend: kernel backend a selection may use; None is the fastest available one.
        causal: whether queries see only keys at or before their position.
        valid_len: int32 scalar, number of tokens before the padding; may be traced. Patterns that
            probe the last queries use the last valid ones and must ignore padding. None is the
            whole sequence.
        documents: documents of each batch entry, or None for one document each. Queries see their
            own document only, and each document gets the same selection as on its own; `valid_len`
            is then None.
        shares: int32 [B], optional per-sequence override of the pattern's mass fraction, in the
            units of its `KeptShare`; may be traced.
    """

    block_ids: "Array"
    num_blocks: int
    axis_names: tuple[str, ...] = ()
    scale: float | None = None
    backend: str | None = None
    causal: bool = True
    valid_len: "Array | None" = None
    documents: "DocumentBlocks | None" = None
    shares: "Array | None" = None

    def ends(self, blocks: "Array", block_size: int) -> "Array | None":
        """Returns where readable tokens end, for the document or sequence of each given block.

        Args:
            blocks: int32 [n], global numbers.
            block_size: tokens per block (g).

        Returns:
            int32 [B or 1, n], global positions, one past the last token; before the document's
            first token if nothing is to be read (dense or no document). None if all are valid.
        """
        import jax.numpy as jnp

        if self.documents is not None:
            own = self.documents.of(blocks)
            return jnp.where(own.dense, 0, own.ends(block_size))
        if self.valid_len is None:
            return None
        return jnp.broadcast_to(self.valid_len, (1, blocks.shape[0]))

    def first_blocks(self, blocks: "Array") -> "Array | None":
        """Returns the first block of the document of each given block int32 [n]: int32 [B, n].

        NB for a block without a document; None without documents.
        """
        return None if self.documents is None else self.documents.of(blocks).first

    def scale_for(self, head_dim: int) -> float:
        return 1.0 / math.sqrt(head_dim) if self.scale is None else self.scale


class KeptShare(NamedTuple):
    """A pattern's mass fraction, which can be tuned during a run.

    Monotone: raising it never drops a pair.

    Attributes:
        name: name of the field.
        bits: it is rounded to multiples of 2^-bits; at most 30.
    """

    name: str
    bits: int


class Selection(NamedTuple):
    """The result of a selection.

    Attributes:
        index: pairs to compute, any `pallas_kernels.index.Index`. Replicated, or if the index is
            `by_rows`, the rows of this rank's blocks.
        statistics: additional per-layer numbers to report, by name: fp32 scalars, or arrays that
            are averaged.
    """

    index: "Index"
    statistics: Mapping[str, "Array"] = {}


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

        Called by `selection.select`, inside `jax.shard_map` on the shards of a sequence or on one
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
