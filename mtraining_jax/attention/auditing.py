"""An audit of attention inside a training step: figures of the choice, of its real gradients too.

The forward pass reports `sparsity.audit.forward_figures`. What the backward pass knows, the
gradient of attention's output, is not there yet; it reports by the cotangent of an input that
nothing reads, the sink. So an audited step runs attention once, as every step does.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from mtraining_jax.sparsity import Shards, exchange
from mtraining_jax.sparsity.audit import AuditRows, forward_figures, gradient_figures
from mtraining_jax.sparsity.document_blocks import DocumentBlocks
from mtraining_jax.sparsity.row_attention import Keys, RowAttention
from pallas_kernels.index import Index
from pallas_kernels.names import INDEX


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["rows", "sink"], meta_fields=["mask_heads"]
)
@dataclasses.dataclass(frozen=True)
class Audit:
    """What to measure in one layer; a pytree.

    Attention then reports two more statistics: `audit`, a dict of the figures of
    `forward_figures`, fp32 [Hq] each; and with `mask_heads` `masks`, the index of these heads of
    the first sequence, with all of its rows.

    Attributes:
        rows: the queries that are measured.
        sink: fp32 [Hq, 2], zeros, whose cotangent is what `gradient_figures` gives; None measures
            no gradient.
        mask_heads: query heads.
    """

    rows: AuditRows
    sink: Array | None = None
    mask_heads: tuple[int, ...] = ()


def audit_shards(
    audit: Audit, q: Array, k: Array, v: Array, index: Index, shards: Shards,
    batch_axes: tuple[str, ...],
) -> tuple[dict[str, Array], RowAttention]:
    """`forward_figures` on one device's shards."""
    return forward_figures(q, audit.rows, _keys(k, v, index, shards), batch_axes)


def mask_of_heads(
    audit: Audit, index: Index, shards: Shards, batch_axes: tuple[str, ...]
) -> Index:
    """The index of some heads of the first sequence, the same on every device."""
    heads = list(audit.mask_heads)
    some = jax.tree.map(lambda x: x[:1, jnp.array(heads)], index)
    some = exchange.all_rows(some, shards.block_ids, shards.num_blocks, shards.axis_names)
    if not batch_axes:
        return some
    first = lax.axis_index(batch_axes) == 0
    return jax.tree.map(lambda x: lax.psum(jnp.where(first, x, 0), batch_axes), some)


def tap_gradient(
    run: Callable[[Callable, tuple], Any],
    shards_of: Callable[..., Shards],
    batch_axes: tuple[str, ...],
    out: Array,
    audit: Audit,
    rows: RowAttention,
    k: Array,
    v: Array,
    index: Index,
    documents: DocumentBlocks | None,
) -> Array:
    """`out` as it is; its gradient, when it comes, is measured on its way.

    Args:
        run: calls a function of (rows, d_out, positions, k, v, index, documents) on the shards of
            every device.
        shards_of: from local queries and documents to where they lie.
        batch_axes: mesh axes that the batch is sharded over.
        out: [B, S, Hq, D], attention's output.
        audit: with a sink.
        rows: attention of the rows everywhere.
        k, v: [B, S, Hk, D].
        index: what was computed, as the shards hold it.
        documents: of each sequence, or None.

    Returns:
        `out`. The cotangent of `audit.sink` is `gradient_figures`.
    """
    # Kept by the same rule as attention's own results, so that the backward pass need not attend
    # to all keys once more.
    rows = jax.tree.map(lambda x: checkpoint_name(x, INDEX), rows)
    given = lax.stop_gradient((rows, k, v)), audit.rows.everywhere, index, documents

    def measure(given: tuple, d_out: Array) -> Array:
        (rows, k, v), positions, index, documents = given

        def local(rows, d_out, positions, k, v, index, documents):
            shards = shards_of(d_out, documents=documents)
            keys = _keys(k, v, index, shards)
            return gradient_figures(rows, d_out, positions, keys, batch_axes)

        return run(local, (rows, d_out, positions, k, v, index, documents))

    return _tapped(measure, out, audit.sink, given)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tapped(measure: Callable, out: Array, sink: Array, given: tuple) -> Array:
    return out


def _tapped_forward(measure: Callable, out: Array, sink: Array, given: tuple):
    return out, given


def _tapped_backward(measure: Callable, given: tuple, d_out: Array):
    return d_out, measure(given, d_out), None


_tapped.defvjp(_tapped_forward, _tapped_backward)


def _keys(k: Array, v: Array, index: Index, shards: Shards) -> Keys:
    return Keys.of(
        k, v, index, block_ids=shards.block_ids, axis_names=shards.axis_names, scale=shards.scale,
        documents=shards.documents,
    )
