"""Inputs of attention in addition to q, k and v, its configuration, and its results."""

import dataclasses
from typing import Any, NamedTuple, Self, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.attention.audit.figures import AuditRows
from mtraining_jax.attention.placement import Placement
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.patterns.base import Pattern
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.document_blocks import DocumentBlocks
from pallas_kernels.index import Index

Stats = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """Inputs of attention in addition to q, k and v; a pytree.

    As an input of a model, the first three fields have a leading layer axis [L, ...]. The others
    are the same for all layers.

    Attributes:
        pattern: a pattern with arrays [Hq, ...] or without arrays, or a global index with arrays
            [B, Hq, ...]; None for the pattern of `make_attention`.
        grad_tap: zeros, fp32 [Hq, 2]; their cotangent is the result of `gradient_figures` for
            `audit_rows`. None skips these metrics.
        overrides, documents, valid_len: as in `SelectionContext`.
        window: keys that each query sees instead of those of the pattern; static. Such a layer is
            not audited.
        audit_rows: queries to measure the metrics of `attention.audit` on, at the cost of exact
            attention of these rows; without sinks.
        sinks: as in `sparse_attention`, fp32 [Hq]; those of a model are its parameters.
    """

    pattern: Pattern | Index | None = None
    overrides: dict[str, Array] | None = None
    grad_tap: Array | None = None
    documents: DocumentBlocks | None = None
    valid_len: Array | None = None
    audit_rows: AuditRows | None = None
    sinks: Array | None = None
    window: int | None = jax.tree.static(default=None)

    def per_layer(self) -> Self:
        """Keeps only what has a layer axis, for a scan over layers."""
        same = ("documents", "valid_len", "audit_rows", "sinks")
        return dataclasses.replace(self, **dict.fromkeys(same))

    def for_layer(self, layer: Self) -> Self:
        """Returns the inputs of one layer, a slice of `per_layer`."""
        own = {name: getattr(layer, name) for name in ("pattern", "overrides", "grad_tap")}
        return dataclasses.replace(self, **own)


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Static arguments of `sparse_attention` and `make_attention`."""

    placement: Placement
    layout: Layout | None  # None for one device in sequence order
    ring: str = "gather"
    scale: float | None = None
    causal: bool = True
    backend: str | None = None
    statistics: bool = False  # whether to measure the index
    by_length: bool = False
    mask_heads: tuple[int, ...] = ()

    def context(self, q: Array, inputs: AttentionInputs) -> SelectionContext:
        """Describes the shard of queries [B, n, Hq, D] to a selection."""
        assert inputs.pattern is not None
        if self.layout is None or self.placement.ranks == 1:
            axes, num_blocks = (), q.shape[1] // inputs.pattern.block_size
            block_ids = jnp.arange(num_blocks, dtype=jnp.int32)
        else:
            axes, num_blocks = self.placement.sequence, self.layout.num_blocks
            block_ids = self.layout.block_ids(lax.axis_index(axes))
        return SelectionContext(
            block_ids,
            num_blocks,
            axes,
            self.scale,
            self.backend,
            self.causal,
            inputs.valid_len,
            cast(DocumentBlocks, inputs.documents),  # None makes it one document
            inputs.overrides or {},
        )


class Residuals(NamedTuple):
    """What `sparse_attention(..., return_residuals=True)` returns in addition to the output.

    Attributes:
        lse: float32 [..., Hq, S], natural logarithm of the sum of exp(logits), without sinks; -inf
            for rows without pairs.
        index: the set of selected pairs, in sequence positions, whatever the order of tokens.
            Arrays are [B, Hq, ...], where B is the product of the batch axes.
    """

    lse: Array
    index: Index


class AttentionOutput(NamedTuple):
    """The results of `sparse_attention`, and the statistics of `make_attention` if requested."""

    out: Array
    lse: Array
    index: Index
    statistics: Stats
