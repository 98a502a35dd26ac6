"""The interface of a sparse pattern: its settings, a choice of pairs, and how it describes itself.

A pattern is one file. It is registered in `registry.py`, or named as `package.module:Name`; see
`examples/strided_pattern.py` for a complete one. This file imports no JAX, so that a configuration
can be read and checked before JAX is loaded.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from mtraining_jax.errors import UserError
from mtraining_jax.sparsity.assumed_density import density_of_vertical_slash

if TYPE_CHECKING:
    from jax import Array

    from mtraining_jax.sparsity.document_blocks import DocumentBlocks
    from pallas_kernels.index import Index


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """What a pattern may need to know of the model before it can choose.

    Attributes:
        num_layers: L.
        num_heads: query heads, Hq.
        seq_len: S, tokens.
        seed: of the run, for what is drawn at random.
    """

    num_layers: int
    num_heads: int
    seq_len: int
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Shards:
    """Where a choice is made: on one device, or inside `jax.shard_map` on shards of a sequence.

    Attributes:
        block_ids: int32 [n/g], global number of each local block of g tokens; every block of the
            sequence is on one rank.
        num_blocks: NB, blocks of the whole sequence.
        axis_names: mesh axes that the sequence is sharded over; () on one device.
        scale: of the logits; None is 1/sqrt(D).
        backend: of kernels that a choice may use; None is the best that runs here.
        causal: whether a query sees only keys that are not ahead of it.
        valid_len: int32 scalar, tokens of the sequence that count; those behind are padding. May
            be traced. A pattern that reads the last queries reads the last of these, and its
            choice must not depend on what the padding holds. None is the whole sequence.
        documents: of each of these sequences (batch entries), in which a query sees its own
            document only, and which is to be chosen as if it were alone; then `valid_len` is None.
            None: each sequence is one.
        shares: int32 [B], the share of the mass that each sequence keeps, in the place of the
            pattern's own, in the unit of its `KeptShare`. May be traced. None: the pattern's own.
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
        """Where the tokens end that a choice may read, of the document or sequence of some blocks.

        Args:
            blocks: int32 [n], global numbers.
            block_size: g.

        Returns:
            int32 [B or 1, n], global positions, one past the last token; before the document's
            first one where nothing is to be read, as the document is dense or there is none. None
            where all tokens count.
        """
        import jax.numpy as jnp

        if self.documents is not None:
            own = self.documents.of(blocks)
            return jnp.where(own.dense, 0, own.ends(block_size))
        if self.valid_len is None:
            return None
        return jnp.broadcast_to(self.valid_len, (1, blocks.shape[0]))

    def first_blocks(self, blocks: "Array") -> "Array | None":
        """The first block of the document of each of some blocks int32 [n]: int32 [B, n].

        NB for a block of no document; None where each sequence is one document.
        """
        return None if self.documents is None else self.documents.of(blocks).first

    def scale_for(self, head_dim: int) -> float:
        """The scale of the logits as a number."""
        return 1.0 / math.sqrt(head_dim) if self.scale is None else self.scale


class KeptShare(NamedTuple):
    """The share of the estimated mass that a pattern keeps, and that can be tuned while it runs.

    A larger share keeps all pairs that a smaller one keeps, and perhaps more.

    Attributes:
        name: the field that says it.
        bits: it is rounded to multiples of 2^-bits; at most 30.
    """

    name: str
    bits: int


class Choice(NamedTuple):
    """What a pattern chose.

    Attributes:
        index: the pairs to compute, of any kind (`pallas_kernels.index.Index`). The same on every
            rank, or if the pattern is `by_rows`, the rows of this rank's blocks.
        statistics: further numbers to report for each layer, by name: fp32 scalars, or arrays
            whose mean is reported.
    """

    index: "Index"
    statistics: Mapping[str, "Array"] = {}


class Settings:
    """The fields of the section `[sparsity]` that one kind reads: a frozen dataclass.

    Types of fields may carry limits (`mtraining_jax.limits.limited`), and "Attributes:" of the
    docstring is their help text. A ValueError of the class begins with the name of the field.

    Attributes:
        block_size: g, tokens on a side of a block.
        chooses: whether pairs are chosen by queries and keys; otherwise recall is not measured,
            and densities are reported under another name.
        density_name: name of the share of computed pairs in what a run prints.
        sparse: whether any pair may be left out.
        by_rows: whether its indices are `by_rows`: each rank of a sequence holds its own rows.
    """

    block_size: int
    sparse: ClassVar[bool] = True
    by_rows: ClassVar[bool] = False
    chooses: ClassVar[bool] = True
    density_name: ClassVar[str] = "density"

    def pattern(self, model: ModelSizes) -> "Pattern":
        """The pattern for a model.

        Arrays of a pattern that differs from layer to layer have a leading axis of layers here.

        Raises:
            UserError: if what the settings name cannot be read, or does not fit the model.
        """
        raise NotImplementedError(f"{type(self).__name__}.pattern")

    def for_documents(self) -> "Settings":
        """What chooses where sequences are made of documents, and reads `Shards.documents`.

        Raises:
            UserError: if the pattern does not keep documents apart, which is the default.
        """
        raise UserError(
            f"{type(self).__name__} does not read packed documents yet: use sampled_rows, "
            "vertical_slash, or dense"
        )

    def for_prompts(self) -> "Settings":
        """What reads a prompt, which ends with what is asked; the default is the settings alike."""
        return self

    def kept_share(self) -> KeptShare | None:
        """The share of mass that `Shards.shares` may replace; None if there is no such share."""
        return None

    def describe(self) -> str:
        """A few words about the pattern, for the start of a run."""
        return type(self).__name__

    def expected_density(self, tokens: int) -> tuple[float, str]:
        """The share of causal pairs to expect before anything is chosen, and the reason for it.

        Args:
            tokens: of a sequence, or of a document that chooses as if it were alone.
        """
        why = "assumed by length, as measured with SmolLM2-135M and, at 512K, by the paper"
        return density_of_vertical_slash(tokens), why

    def takes_choosing(self) -> bool:
        """Whether a step chooses an index, used or not. For estimates of time."""
        return self.chooses

    def scoring_share(self) -> float:
        """FLOP of scoring pairs for a choice, over those of a dense forward pass of attention.

        For estimates of time. 0 where a choice looks at a fixed number of queries.
        """
        return 0.0

    def softmax_share(self) -> float:
        """The share of all pairs whose scores go through a softmax before anything is chosen.

        For estimates of time: many exponentials take longer than the products that they are of.
        """
        return 0.0

    def more_pairs(self) -> str:
        """Which field to change for more pairs, and with them more of attention's mass."""
        return "other settings under [sparsity] may keep more pairs"

    def capacities(self, num_blocks: int) -> tuple[int, int]:
        """How many int32 numbers an index of one head has room for, and how many are columns.

        For estimates of memory. Columns are keys that are gathered for each head. The default is
        that of a `BlockSparseIndex` with room for every block.
        """
        return 2 * num_blocks * (num_blocks + 1), 0

    def query_copies(self, num_blocks: int) -> int:
        """How many copies of all queries and outputs a layer takes, for estimates of memory."""
        del num_blocks
        return 0


class Pattern(Settings):
    """A way to choose which pairs attention computes.

    A frozen dataclass, static under `jax.jit`. A pattern with arrays names them in `arrays` and is
    then a pytree. Each array has the query heads as its leading axis; a pattern for all layers of
    a model has the layers before them.

    Attributes:
        arrays: names of the fields that are arrays.
        also_not_causal: whether `choose` works where keys may be ahead of queries.
    """

    arrays: ClassVar[tuple[str, ...]] = ()
    also_not_causal: ClassVar[bool] = False

    def __new__(cls, *_args, **_fields):
        """Registers a pattern with arrays as a pytree before the first one is made."""
        if cls.arrays:
            _register(cls)
        return super().__new__(cls)

    def pattern(self, model: ModelSizes) -> "Pattern":
        """The pattern itself, which fits any model."""
        return self

    def choose(self, q: "Array", k: "Array", shards: Shards) -> Choice:
        """Chooses the pairs to compute, per batch entry and query head.

        Called by `choose.choose`, inside `jax.shard_map` on the shards of a sequence or on one
        device. All ranks must get the same index, or their rows of it, whatever their number.

        Args:
            q: [B, n, Hq, D], local queries, rotary embedding applied.
            k: [B, n, Hk, D], local keys in the same dtype; Hk divides Hq.
            shards: where they lie in the sequence.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no choose(self, q, k, shards), which every pattern needs"
        )


@functools.cache
def _register(cls: type) -> None:
    import jax

    static = [field.name for field in dataclasses.fields(cls) if field.name not in cls.arrays]
    jax.tree_util.register_dataclass(cls, data_fields=list(cls.arrays), meta_fields=static)
