"""Attention audit inside a training step: metrics of the index and of its real gradients.

The forward pass returns `attention.audit.forward_figures`. Backward-pass metrics need the gradient
of attention's output; they are returned as the cotangent of an unused zero input, `grad_tap`. An
audited step therefore runs attention only once.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.selection import collectives
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.row_attention import Keys
from pallas_kernels.index import Index


def keys_of(k: Array, v: Array, index: Index, context: SelectionContext) -> Keys:
    """Returns the keys of one device's shards as the metrics read them."""
    return Keys.of(
        k,
        v,
        index,
        block_ids=context.block_ids,
        axis_names=context.axis_names,
        scale=context.scale,
        documents=context.documents,
    )


def mask_of_heads(
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
def tapped(measure: Callable, out: Array, grad_tap: Array, residuals: tuple) -> Array:
    """Returns `out`; the cotangent of `grad_tap` is `measure(d_out, *residuals)`."""
    return out


def _tapped_forward(measure: Callable, out: Array, grad_tap: Array, residuals: tuple):
    return out, residuals


def _tapped_backward(measure: Callable, residuals: tuple, d_out: Array):
    return d_out, measure(d_out, *residuals), None


tapped.defvjp(_tapped_forward, _tapped_backward)
