"""Attention audit inside a training step: metrics of the index and of its real gradients.

The forward pass returns `attention.audit.forward_figures`. Backward-pass metrics need the gradient
of attention's output; they are returned as the cotangent of an unused zero input, `grad_tap`. An
audited step therefore runs attention only once.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from mtraining_jax.attention.audit.figures import AuditRows, forward_figures, gradient_figures
from mtraining_jax.selection import collectives
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.document_blocks import DocumentBlocks
from mtraining_jax.selection.row_attention import Keys, RowAttention
from pallas_kernels.index import Index
from pallas_kernels.names import INDEX


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["rows", "grad_tap"], meta_fields=["mask_heads"]
)
@dataclasses.dataclass(frozen=True)
class Audit:
    """What to measure in one layer; a pytree.

    Adds two entries to the statistics of attention: `audit`, a dict of the metrics of
    `forward_figures` (fp32 [Hq] each), and with `mask_heads` also `masks`, the index of these
    heads of the first sequence with all of its rows.

    Attributes:
        rows: the queries to measure.
        grad_tap: zeros, fp32 [Hq, 2]; its cotangent is the result of `gradient_figures`. None skips
            the gradient metrics.
        mask_heads: query heads to return masks of.
    """

    rows: AuditRows
    grad_tap: Array | None = None
    mask_heads: tuple[int, ...] = ()


def audit_shards(
    audit: Audit,
    q: Array,
    k: Array,
    v: Array,
    index: Index,
    context: SelectionContext,
    batch_axes: tuple[str, ...],
) -> tuple[dict[str, Array], RowAttention]:
    """Computes `forward_figures` on one device's shards."""
    return forward_figures(q, audit.rows, _keys(k, v, index, context), batch_axes)


def mask_of_heads(
    audit: Audit, index: Index, context: SelectionContext, batch_axes: tuple[str, ...]
) -> Index:
    """Returns the index of `audit.mask_heads` of the first sequence, replicated on all devices."""
    heads = jnp.array(list(audit.mask_heads))
    masks = jax.tree.map(lambda x: x[:1, heads], index)
    masks = collectives.all_rows(masks, context.block_ids, context.num_blocks, context.axis_names)
    if not batch_axes:
        return masks
    first = lax.axis_index(batch_axes) == 0
    return jax.tree.map(lambda x: lax.psum(jnp.where(first, x, 0), batch_axes), masks)


def tap_gradient(
    run: Callable[[Callable, tuple], Any],
    shards_of: Callable[..., SelectionContext],
    batch_axes: tuple[str, ...],
    out: Array,
    audit: Audit,
    rows: RowAttention,
    k: Array,
    v: Array,
    index: Index,
    documents: DocumentBlocks | None,
) -> Array:
    """Returns `out` unchanged and measures its gradient in the backward pass.

    The cotangent of `audit.grad_tap` is the result of `gradient_figures`. `run` calls a function
    of (rows, d_out, positions, k, v, index, documents) on the shards of every device, where
    `shards_of` builds the `SelectionContext`. `rows` are the exact attention of the audited rows, replicated.
    """
    # Same checkpoint name as attention's results: the backward pass must not recompute attention
    # over all keys.
    rows = jax.tree.map(lambda x: checkpoint_name(x, INDEX), rows)
    residuals = lax.stop_gradient((rows, k, v)), audit.rows.everywhere, index, documents

    def measure(residuals: tuple, d_out: Array) -> Array:
        (rows, k, v), positions, index, documents = residuals

        def measure_shard(rows, d_out, positions, k, v, index, documents):
            context = shards_of(d_out, documents=documents)
            keys = _keys(k, v, index, context)
            return gradient_figures(rows, d_out, positions, keys, batch_axes)

        return run(measure_shard, (rows, d_out, positions, k, v, index, documents))

    return _tapped(measure, out, audit.grad_tap, residuals)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tapped(measure: Callable, out: Array, grad_tap: Array | None, residuals: tuple) -> Array:
    return out


def _tapped_forward(measure: Callable, out: Array, grad_tap: Array | None, residuals: tuple):
    return out, residuals


def _tapped_backward(measure: Callable, residuals: tuple, d_out: Array):
    return d_out, measure(residuals, d_out), None


_tapped.defvjp(_tapped_forward, _tapped_backward)


def _keys(k: Array, v: Array, index: Index, context: SelectionContext) -> Keys:
    return Keys.of(
        k,
        v,
        index,
        block_ids=context.block_ids,
        axis_names=context.axis_names,
        scale=context.scale,
        documents=context.documents,
    )
