"""Attention audit inside a training step: metrics of the index and of its real gradients.

The forward pass returns `forward_figures`. Backward-pass metrics need the gradient of attention's
output; they are returned as the cotangent of an unused zero input, `grad_tap`. An audited step
therefore runs attention only once.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from mtraining_jax.attention.inputs import Stats
from mtraining_jax.config import Config
from mtraining_jax.models.spec import layer_windows
from mtraining_jax.selection import collectives
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.row_attention import Keys, RowAttention
from mtraining_jax.tools.audit.figures import (
    GRADIENT_FIGURES,
    AuditRows,
    forward_figures,
    gradient_figures,
)
from pallas_kernels import names
from pallas_kernels.index import Index


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Audit:
    """Measures attention to an index, as an `Observer`.

    The statistics are `audit`, the metrics of `forward_figures`, and with `mask_heads` also
    `masks`, the index of these heads of the first sequence with all of its rows. Costs exact
    attention of the rows. Not supported if a mesh axis shards the heads.

    Attributes:
        rows: queries to measure.
        grad_tap: zeros, fp32 [Hq, 2]; their cotangent is the result of `gradient_figures`. None
            skips these metrics.
        mask_heads: query heads with their masks included; static.
    """

    rows: AuditRows
    grad_tap: Array | None = None
    mask_heads: tuple[int, ...] = jax.tree.static(default=())

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
        """Returns `out`, which passes its gradient to the metrics, and the statistics."""
        keys_of = functools.partial(Keys.of, axis_names=context.axis_names, scale=context.scale)
        shards = {"block_ids": context.block_ids, "documents": context.documents}
        figures, exact = forward_figures(q, self.rows, keys_of(k, v, index, **shards), batch_axes)
        stats: Stats = {"audit": figures}
        if self.mask_heads:
            stats["masks"] = _mask_of_heads(self.mask_heads, index, context, batch_axes)
        if self.grad_tap is not None:
            # Same checkpoint name as attention's results: the backward pass must not recompute
            # attention over all keys.
            exact = jax.tree.map(lambda x: checkpoint_name(x, names.INDEX), exact)
            residuals = *lax.stop_gradient((exact, k, v)), index, shards, self.rows.everywhere
            measure = functools.partial(_measure_gradient, keys_of, batch_axes)
            out = _tapped(measure, out, self.grad_tap, residuals)
        return out, stats


@dataclasses.dataclass(frozen=True)
class StepAudit:
    """Audits all layers of a training step, as a `StepObserver`.

    Attributes:
        layers_and_heads: number of layers and of query heads.
        seq_len: S.
        num_queries: queries to sample in each step.
        last: whether some are among the last ones.
        mask_heads: as in `Audit`.
    """

    layers_and_heads: tuple[int, int]
    seq_len: int
    num_queries: int
    last: bool
    mask_heads: tuple[int, ...] = ()

    def draw(self, key: Array) -> AuditRows:
        """Draws the queries of a step."""
        return AuditRows.draw(key, self.seq_len, self.num_queries, last=self.last)

    def taps(self) -> Array:
        """Returns zeros; `results` takes their cotangent."""
        return jnp.zeros((*self.layers_and_heads, len(GRADIENT_FIGURES)), jnp.float32)

    def observer(self, drawn: AuditRows, taps: Array) -> Audit:
        """Returns the observers of all layers, with a leading layer axis."""
        layers, _ = self.layers_and_heads
        rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (layers, *x.shape)), drawn)
        return Audit(rows, taps, self.mask_heads)

    def results(self, layers: dict[str, Any], tap_gradients: Array) -> dict[str, Any]:
        """Adds the metrics of gradients, the cotangent of the taps, to statistics of layers."""
        unknown = jnp.isnan(layers["audit"]["recall"])  # as in layers with a window
        tap_gradients = jnp.where(unknown[..., None], jnp.nan, tap_gradients)
        figures = zip(GRADIENT_FIGURES, jnp.moveaxis(tap_gradients, -1, 0), strict=True)
        return layers | {"audit": layers["audit"] | dict(figures)}


def _measure_gradient(
    keys_of: Callable[..., Keys],
    batch_axes: tuple[str, ...],
    d_out: Array,
    exact: RowAttention,
    k: Array,
    v: Array,
    index: Index,
    shards: dict[str, Any],
    positions: Array,
) -> Array:
    keys = keys_of(k, v, index, **shards)
    figures = gradient_figures(exact, d_out, positions, keys, batch_axes)
    # All devices have these figures, but `jax.shard_map` sums the cotangents of its devices.
    axes = batch_axes + keys.axis_names
    return jnp.where(lax.axis_index(axes) == 0, figures, 0) if axes else figures


def _mask_of_heads(
    heads: tuple[int, ...], index: Index, context: SelectionContext, batch_axes: tuple[str, ...]
) -> Index:
    """Returns the index of some heads of the first sequence, replicated on all devices."""
    numbers = jnp.array(list(heads))
    masks = jax.tree.map(lambda x: x[:1, numbers], index)
    masks = collectives.all_rows(masks, context.block_ids, context.num_blocks, context.axis_names)
    if not batch_axes:
        return masks
    first = lax.axis_index(batch_axes) == 0
    return jax.tree.map(lambda x: lax.psum(jnp.where(first, x, 0), batch_axes), masks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tapped(measure: Callable, out: Array, grad_tap: Array, residuals: tuple) -> Array:
    """Returns `out`; the cotangent of `grad_tap` is `measure(d_out, *residuals)`."""
    return out


def _tapped_forward(measure: Callable, out: Array, grad_tap: Array, residuals: tuple):
    return out, residuals


def _tapped_backward(measure: Callable, residuals: tuple, d_out: Array):
    return d_out, measure(d_out, *residuals), None


_tapped.defvjp(_tapped_forward, _tapped_backward)


def build_audit(config: Config) -> StepAudit | None:
    """Builds the audit of steps; None if there is none, as with dense attention and windows."""
    model, data = config.model, config.data
    selects = config.sparsity.pattern.sparse and None in layer_windows(model)
    if not (config.audit.interval and selects):
        return None
    return StepAudit(
        (model.num_layers, model.num_heads),
        data.seq_len,
        config.audit.num_queries,
        # With documents, the end of a sequence is the end of one document, or padding.
        last=not data.has_documents,
        mask_heads=tuple(sorted({head for _, head in config.audited_masks})),
    )
