"""Inputs of attention in addition to q, k and v, its configuration, and its results."""

import dataclasses
from typing import Any, NamedTuple, Protocol, Self

import jax
from jax import Array

from mtraining_jax.attention.placement import Placement
from mtraining_jax.documents import Documents
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.patterns.base import Pattern
from mtraining_jax.selection.context import SelectionContext
from pallas_kernels.index import Index

Stats = dict[str, Any]


class Observer(Protocol):
    """Measures the attention of a layer, on the shards of one device; a pytree."""

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        index: Index,
        context: SelectionContext,
        batch_axes: tuple[str, ...],
    ) -> tuple[Array, Stats]:
        """Returns `out`, perhaps with another gradient, and statistics of the layer by name.

        `out` and `index` are the results of attention, without sinks. `batch_axes` are the mesh
        axes of other sequences and heads. Statistics are the same on all devices.
        """
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """Inputs of attention in addition to q, k and v; a pytree.

    As an input of a model, pattern, mass fraction and observer have a leading layer axis [L, ...].
    The others are the same for all layers.

    Attributes:
        pattern: a pattern with arrays [Hq, ...] or without arrays, or a global index with arrays
            [B, Hq, ...]; None for the pattern of `make_attention`.
        observer: measures attention.
        overrides, documents: as in `SelectionContext`.
        window: keys that each query sees instead of those of the pattern; static. Such a layer is
            not observed.
        sinks: as in `sparse_attention`, fp32 [Hq]; those of a model are its parameters.
    """

    pattern: Pattern | Index | None = None
    overrides: dict[str, Array] | None = None
    observer: Observer | None = None
    documents: Documents | None = None
    sinks: Array | None = None
    window: int | None = jax.tree.static(default=None)

    def per_layer(self) -> Self:
        """Keeps only what has a layer axis, for a scan over layers."""
        return dataclasses.replace(self, documents=None, sinks=None)

    def for_layer(self, layer: Self) -> Self:
        """Returns the inputs of one layer, a slice of `per_layer`."""
        own = {name: getattr(layer, name) for name in ("pattern", "overrides", "observer")}
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
