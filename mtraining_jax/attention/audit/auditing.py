"""Attention audit inside a training step: metrics of the index and of its real gradients.

The forward pass returns `forward_figures`. Backward-pass metrics need the gradient of attention's
output; they are returned as the cotangent of an unused zero input, `grad_tap`. An audited step
therefore runs attention only once.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from mtraining_jax.attention.audit.figures import AuditRows, forward_figures, gradient_figures
from mtraining_jax.attention.inputs import AttentionInputs, AttentionSpec, Stats
from mtraining_jax.selection import collectives
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.row_attention import Keys, RowAttention
from pallas_kernels import names
from pallas_kernels.index import Index


def audit(
    spec: AttentionSpec, qkv: tuple[Array, ...], out: Array, index: Index, inputs: AttentionInputs
) -> tuple[Array, Stats]:
    """Measures attention to an index on the shards of one device.

    Returns `out`, which passes its gradient to the metrics, and `audit` and `masks` as in
    `make_attention`.
    """
    q, k, v = qkv
    rows, grad_tap = cast(AuditRows, inputs.audit_rows), inputs.grad_tap
    inputs = dataclasses.replace(inputs, pattern=index, grad_tap=None)
    axes, context = spec.placement.other_axes, spec.context(q, inputs)
    figures, exact = forward_figures(q, rows, _keys(k, v, index, context), axes)
    stats: Stats = {"audit": figures}
    if spec.mask_heads:
        stats["masks"] = _mask_of_heads(spec.mask_heads, index, context, axes)
    if grad_tap is not None:
        # Same checkpoint name as attention's results: the backward pass must not recompute
        # attention over all keys.
        exact = jax.tree.map(lambda x: checkpoint_name(x, names.INDEX), exact)
        residuals = *lax.stop_gradient((exact, k, v)), inputs
        out = _tapped(functools.partial(_measure_gradient, spec), out, grad_tap, residuals)
    return out, stats


def _measure_gradient(
    spec: AttentionSpec,
    d_out: Array,
    exact: RowAttention,
    k: Array,
    v: Array,
    inputs: AttentionInputs,
) -> Array:
    index, rows = cast(Index, inputs.pattern), cast(AuditRows, inputs.audit_rows)
    keys = _keys(k, v, index, spec.context(d_out, inputs))
    figures = gradient_figures(exact, d_out, rows.everywhere, keys, spec.placement.other_axes)
    # All devices have these figures, but `jax.shard_map` sums the cotangents of its devices.
    axes = spec.placement.axes
    return jnp.where(lax.axis_index(axes) == 0, figures, 0) if axes else figures


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
