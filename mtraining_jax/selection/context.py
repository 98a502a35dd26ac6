"""The input of a selection, with its checks, and the result."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array

from mtraining_jax.documents import Documents
from mtraining_jax.utils.limits import MAX_BLOCKS, MAX_POSITIONS
from pallas_kernels.index import Index


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
        documents: documents of each batch entry. Queries see their own document only, and each
            document gets the same selection as on its own. Defaults to one document without
            padding. Patterns that probe the last queries use the last real ones and must ignore
            padding, also that of a single document (`Documents.padded`).
        dense_below: blocks (static). Packed documents of fewer blocks use dense attention: their
            tokens need no scores.
        overrides: values of options for each sequence, by name: int32 [B], in the units of
            `Pattern.overridable`; may be traced.
    """

    block_ids: Array
    num_blocks: int
    axis_names: tuple[str, ...] = ()
    scale: float | None = None
    backend: str | None = None
    causal: bool = True
    documents: Documents = cast(Any, None)
    dense_below: int = 0
    overrides: Mapping[str, Array] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.documents is None:
            object.__setattr__(self, "documents", Documents.whole(self.num_blocks))
        if self.documents.packed:
            object.__setattr__(self, "documents", jax.tree.map(jnp.asarray, self.documents))

    @property
    def shards(self) -> tuple[Array, int, tuple[str, ...]]:
        """`block_ids`, `num_blocks` and `axis_names`, the last arguments of collectives."""
        return self.block_ids, self.num_blocks, self.axis_names

    def ends(self, blocks: Array) -> Array | None:
        """Returns where readable tokens end, for the document of each block int32 [n].

        int32 [B or 1, n], global positions, one past the last token; before the document's first
        token if nothing is to be read (dense or no document). None if all are valid: masks then
        cost nothing.
        """
        if self.documents.is_whole:
            return None
        documents = self.documents.of(blocks)
        return jnp.where(documents.shorter_than(self.dense_below), 0, documents.ends())

    def first_blocks(self, blocks: Array) -> Array | None:
        """Returns the first block of the document of each given block int32 [n]: int32 [B, n].

        NB for a block without a document. None if all are 0: kernels then compare nothing.
        """
        return self.documents.of(blocks).first if self.documents.packed else None

    def scale_for(self, head_dim: int) -> float:
        return 1.0 / math.sqrt(head_dim) if self.scale is None else self.scale


class Selection(NamedTuple):
    """The result of a selection.

    Attributes:
        index: pairs to compute, any `pallas_kernels.index.Index`. Replicated, or if the index is
            `sharded_by_query`, the rows of this rank's blocks.
        statistics: additional per-layer numbers to report, by name: fp32 scalars, or arrays that
            are averaged.
    """

    index: Index
    statistics: Mapping[str, Array] = {}


def check_selection(q: Array, k: Array, context: SelectionContext, block_size: int) -> float:
    """Checks queries and keys of a selection.

    Raises:
        ValueError: if shapes, dtypes or sizes are invalid.
    """
    if q.ndim != 4 or k.ndim != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape} and k {k.shape} must be [B, n, H, D] with equal B, n and D")
    if q.dtype != k.dtype:
        raise ValueError(f"q is {q.dtype} but k is {k.dtype}; they must have the same dtype")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} key/value heads"
        )
    blocks, num_blocks = context.block_ids.shape, context.num_blocks
    if blocks != (q.shape[1] // block_size,) or q.shape[1] % block_size:
        raise ValueError(
            f"{q.shape[1]} local tokens do not match {blocks} blocks of block_size={block_size}"
        )
    if num_blocks > MAX_BLOCKS or num_blocks * block_size > MAX_POSITIONS:
        raise ValueError(
            f"num_blocks={num_blocks} of block_size={block_size} exceeds the limit of "
            f"{MAX_BLOCKS} blocks and {MAX_POSITIONS} tokens"
        )
    scale = context.scale_for(q.shape[3])
    if not scale > 0:
        raise ValueError(f"scale={scale} must be positive")
    return scale


def with_dense_documents(
    q: Array, k: Array, context: SelectionContext, block_size: int, blocks: int
) -> SelectionContext:
    """Checks a selection, and returns its context with documents of fewer blocks dense."""
    check_selection(q, k, context, block_size)
    return dataclasses.replace(context, dense_below=blocks)
