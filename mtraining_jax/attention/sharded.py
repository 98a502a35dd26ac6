"""Shared implementation of attention: select an index, measure it, attend.

Used by `sparse_attention` and by the trainer's layers, on one device or a mesh.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mtraining_jax.attention.audit.auditing import Audit, audit_shards, mask_of_heads, tap_gradient
from mtraining_jax.attention.audit.figures import AuditRows
from mtraining_jax.attention.composed import composed_ring
from mtraining_jax.attention.placement import Placement
from mtraining_jax.parallel.groups import shared_axes
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import DATA_AXIS, SEQUENCE_AXES
from mtraining_jax.parallel.ring import check_ring, ring_attention
from mtraining_jax.patterns import Pattern
from mtraining_jax.patterns.select import select
from mtraining_jax.selection import collectives
from mtraining_jax.selection.by_length import pairs_by_length
from mtraining_jax.selection.context import Selection, SelectionContext
from mtraining_jax.selection.document_blocks import DocumentBlocks
from mtraining_jax.selection.metrics import causal_pairs, density, pairs_to_share
from mtraining_jax.selection.row_attention import RowAttention
from mtraining_jax.utils.errors import UserError
from pallas_kernels import attention
from pallas_kernels.index import Index, TokenChunksIndex

Stats = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Static configuration of an attention call.

    Attributes:
        layout: token order over the ranks of a sequence; None for one device in sequence order.
        ring, scale, causal, backend: see `sparse_attention`.
        statistics: whether to measure the index.
        by_length: whether to also count its pairs by document length.
    """

    placement: Placement
    layout: Layout | None
    ring: str = "gather"
    scale: float | None = None
    causal: bool = True
    backend: str | None = None
    statistics: bool = False
    by_length: bool = False


class AttentionOutput(NamedTuple):
    """The results of attention.

    Attributes:
        out, lse, index: see `sparse_attention`.
        statistics: see `make_attention`; empty unless requested.
        rows: exact attention of the audited rows; None without an audit.
    """

    out: Array
    lse: Array
    index: Index
    statistics: Stats
    rows: RowAttention | None = None


def attend(
    spec: AttentionSpec,
    q: Array,
    k: Array,
    v: Array,
    pattern: Pattern | Index,
    audit: Audit | None = None,
    valid_len: Array | None = None,
    documents: DocumentBlocks | None = None,
    shares: Array | None = None,
) -> AttentionOutput:
    """Computes attention over the pairs selected by a pattern or listed in an index.

    Args:
        q, k, v: [B, S, Hq or Hk, D] in the order of `spec.layout`, after rotary embedding.
        pattern: a pattern with arrays [Hq, ...], or an index with arrays [B, Hq, ...].
        audit: what to measure, or None. Not supported if a mesh axis shards the heads.
        valid_len, documents: see `sparse_attention`. Queries attend within their document, even if
            an index lists other pairs.
        shares: int32 [B], optional per-sequence override of the pattern's mass fraction, in the
            units of `SelectionContext.shares`; not for an index.
    """
    if shares is not None and isinstance(pattern, Index):
        raise ValueError("shares override the mass fraction of a pattern, but pattern is an index")
    placement = spec.placement
    others = shared_axes((*placement.batch, *placement.heads))
    arrays, static = partition(pattern)
    heads = P(placement.batch, placement.sequence, placement.heads)
    per_head = P(placement.batch, placement.heads)
    rows = P(placement.batch, placement.heads, placement.sequence)
    by_rows = _by_rows(pattern, documents)
    of_index = rows if by_rows else per_head
    array_spec = of_index if isinstance(pattern, Index) else P(placement.heads)
    of_batch = P(placement.batch)
    in_specs = heads, heads, heads, array_spec, P(), P(), of_batch, of_batch
    out_specs = AttentionOutput(*cast(Any, (heads, rows, of_index, P(), of_batch)))
    order = _order_of_rows(spec) if by_rows else None
    if order is not None and isinstance(pattern, Index):
        arrays = [placement.take(x, order, axis=2) for x in arrays]

    def attend_on_shard(
        q: Array,
        k: Array,
        v: Array,
        arrays: list[Array],
        audit: Audit | None,
        valid_len: Array | None,
        documents: DocumentBlocks | None,
        shares: Array | None,
    ) -> AttentionOutput:
        context = _shards(spec, q, pattern.block_size, valid_len, documents, shares)
        return _attend_on_shard(spec, q, k, v, combine(static, arrays), audit, context, others)

    forward_audit = audit and dataclasses.replace(audit, grad_tap=None)
    args = (q, k, v, arrays, forward_audit, valid_len, documents, shares)
    args = placement.reshard(args, in_specs)
    output = placement.run(attend_on_shard, in_specs, out_specs, args)
    if audit is not None and audit.grad_tap is not None:
        specs = (P(placement.batch), heads, P(), heads, heads, of_index, P(placement.batch))
        shards_of = functools.partial(
            _shards, spec, block_size=output.index.block_size, valid_len=None, shares=None
        )
        out = tap_gradient(
            functools.partial(_run, placement, specs),
            shards_of,
            others,
            output.out,
            audit,
            output.rows,
            k,
            v,
            output.index,
            documents,
        )
        output = output._replace(out=out)
    if order is None:
        return output
    back = functools.partial(placement.take, order=np.argsort(order), axis=2)
    return output._replace(index=jax.tree.map(back, output.index))


def _by_rows(pattern: Pattern | Index, documents: DocumentBlocks | None) -> bool:
    if isinstance(pattern, Index):
        return pattern.by_rows
    return pattern.row_sharded(documents is not None)


def _run(placement: Placement, in_specs: tuple, function: Callable, args: tuple) -> Any:
    return placement.run(function, in_specs, P(), args)


def _within_documents(index: Index, documents: DocumentBlocks, rows: Array) -> Index:
    """Restricts an index to pairs within documents; `rows` are the local row blocks."""
    try:
        return index.within_documents(*documents.spans(), rows)
    except NotImplementedError as error:
        raise UserError(
            f"pattern: {error}; use a BlockMaskIndex, a DenseDocumentsIndex or a pattern"
        ) from error


def _order_of_rows(spec: AttentionSpec) -> np.ndarray | None:
    """Returns the global block numbers of all ranks in layout order, or None on one device."""
    if spec.layout is None or spec.placement.ranks == 1:
        return None
    size = spec.layout.block_size
    return spec.layout.permutation()[::size] // size


def partition(pattern: Pattern | Index) -> tuple[list[Array], object]:
    """Splits a pattern or index into its arrays and a hashable rest."""
    leaves, treedef = jax.tree.flatten(pattern)
    if leaves and leaves[0] is pattern:  # not a pytree: entirely static
        return [], pattern
    return leaves, treedef


def combine(static: object, arrays: list[Array]) -> Pattern | Index:
    """Rebuilds the pattern or index from the results of `partition`."""
    if isinstance(static, Pattern):
        return static
    return jax.tree.unflatten(cast(Any, static), arrays)


def _attend_on_shard(
    spec: AttentionSpec,
    q: Array,
    k: Array,
    v: Array,
    pattern: Pattern | Index,
    audit: Audit | None,
    context: SelectionContext,
    others: tuple[str, ...],
) -> AttentionOutput:
    """Attention on one device's shards; `others` are the axes of other sequences and heads."""
    if isinstance(pattern, Pattern):
        with jax.named_scope("selection"):
            selection = select(pattern, q, k, context)
        by_rows = _by_rows(pattern, context.documents)
        if selection.index.by_rows != by_rows:
            raise ValueError(
                f"{type(pattern).__name__}.by_rows={by_rows}, but it returned a "
                f"{type(selection.index).__name__} with by_rows={selection.index.by_rows}; "
                "they must be equal"
            )
    elif context.documents is not None:
        selection = Selection(_within_documents(pattern, context.documents, context.block_ids))
    else:
        selection = Selection(pattern)
    index = selection.index
    statistics: Stats = {}
    if spec.statistics:
        seq_len = context.num_blocks * pattern.block_size
        statistics = _measure(selection, seq_len, context, spec.by_length)
        statistics = lax.pmean(statistics, others) if others else statistics
        statistics = lax.stop_gradient(statistics)
    rows = None
    if audit is not None:
        statistics["audit"], rows = audit_shards(audit, q, k, v, index, context, others)
        if audit.mask_heads:
            statistics["masks"] = mask_of_heads(audit, index, context, others)
    if spec.layout is None or not context.axis_names:
        out, lse = attention(
            q, k, v, index, scale=spec.scale, backend=spec.backend, return_lse=True
        )
    else:
        ring = functools.partial(
            ring_attention,
            layout=spec.layout,
            axis_names=context.axis_names,
            axis_sizes=tuple(spec.placement.size((axis,)) for axis in context.axis_names),
            ring=spec.ring,
            scale=spec.scale,
            backend=spec.backend,
            return_lse=True,
        )
        if isinstance(index, TokenChunksIndex):
            out, lse = composed_ring(ring, q, k, v, index, context)
        else:
            out, lse = ring(q, k, v, index)
    return AttentionOutput(out, lse, index, statistics, rows)


def _shards(
    spec: AttentionSpec,
    q: Array,
    block_size: int,
    valid_len: Array | None,
    documents: DocumentBlocks | None,
    shares: Array | None,
) -> SelectionContext:
    axes = spec.placement.sequence if spec.placement.ranks > 1 else ()
    if axes and spec.layout is not None:
        num_blocks, block_ids = spec.layout.num_blocks, spec.layout.block_ids(lax.axis_index(axes))
    else:
        num_blocks = q.shape[1] // block_size
        block_ids = jnp.arange(num_blocks, dtype=jnp.int32)
    return SelectionContext(
        block_ids,
        num_blocks,
        axes,
        spec.scale,
        spec.backend,
        spec.causal,
        valid_len,
        documents,
        shares,
    )


def _measure(
    selection: Selection, seq_len: int, context: SelectionContext, by_length: bool
) -> Stats:
    """Measures density and executed pairs, and adds the statistics of the pattern."""
    block_size, documents = selection.index.block_size, context.documents
    total = pairs_to_share(seq_len, block_size, documents)
    rows = collectives.rows_of(context.block_ids, context.axis_names)
    numbers = {
        "density": density(selection.index, seq_len, rows, documents),
        "executed": selection.index.executed_pairs(seq_len, rows) / total,
        **selection.statistics,
    }
    if documents is not None:
        # In floating point: from 65536 tokens on, the pair count overflows an int32.
        share = documents.causal_pairs(block_size) / float(causal_pairs(seq_len))
        numbers |= {
            "document_pairs": share,
            "computed_pairs": numbers["density"] * share,
            "executed_pairs": numbers["executed"] * share,
        }
        if by_length:
            numbers |= pairs_by_length(selection.index, rows, documents, seq_len)
    return {name: jnp.mean(x, dtype=jnp.float32) for name, x in numbers.items()}


def make_attention(
    mesh: Mesh,
    layout: Layout,
    pattern: Pattern,
    *,
    ring: str = "gather",
    backend: str | None = None,
    scale: float | None = None,
    audit_rows: AuditRows | None = None,
    mask_heads: tuple[int, ...] = (),
    valid_len: Array | None = None,
    by_length: bool = False,
    batch_axis: str = DATA_AXIS,
    sequence_axes: tuple[str, ...] = SEQUENCE_AXES,
) -> Callable[..., tuple[Array, Stats]]:
    """Builds the causal attention function of a model's layers.

    Args:
        mesh: mesh with axes of type Auto, including `batch_axis` and `sequence_axes`.
        layout: token order, for as many ranks as `sequence_axes` have devices.
        pattern: the default sparse pattern.
        ring, backend, scale, valid_len: see `sparse_attention`.
        audit_rows: queries to measure the metrics of `attention.audit` on, or None. They cost as
            much as exact attention of these rows, forward and backward.
        mask_heads: query heads with their masks included in an audit.
        by_length: also count computed pairs by document length.

    Returns:
        A function `attention(q, k, v, given=None, documents=None, shares=None, sink=None) -> (out,
        stats)` for use under `jax.jit`. q, k and v are in layout order, after rotary embedding.
        `given` replaces `pattern` in this call with a per-layer pattern, or with a global index
        [B, Hq, ...]. `shares` are as in `SelectionContext`, `sink` is the `grad_tap` of an `Audit`.

        stats are fp32 scalars, means over heads and batch (inside `in_groups`, of each
        data-parallel replica): `density` (computed pairs over causal pairs), `executed` (pairs in
        executed tiles over causal pairs) and `Selection.statistics`. With documents, these ratios are
        relative to causal pairs within documents. `document_pairs`, `computed_pairs` and
        `executed_pairs` are then relative to all causal pairs of the sequence, so they may be
        averaged over sequences; `by_length` adds the counts of `pairs_by_length`. With
        `audit_rows`, stats also has `audit` and `masks`; see `Audit`.
    """
    check_ring(ring)
    ranks = math.prod(mesh.shape[name] for name in sequence_axes)
    if ranks != layout.num_ranks:
        raise ValueError(
            f"layout has num_ranks={layout.num_ranks}, but the mesh axes {sequence_axes} have "
            f"{ranks} devices"
        )
    placement = Placement(mesh, (batch_axis,), tuple(sequence_axes))
    spec = AttentionSpec(placement, layout, ring, scale, True, backend, True, by_length)
    run = functools.partial(attend, spec, valid_len=valid_len)

    def attention(
        q: Array,
        k: Array,
        v: Array,
        given: Pattern | Index | None = None,
        documents: DocumentBlocks | None = None,
        shares: Array | None = None,
        sink: Array | None = None,
    ) -> tuple[Array, Stats]:
        audit = None if audit_rows is None else Audit(audit_rows, sink, tuple(mask_heads))
        selected_by = pattern if given is None else given
        output = run(q, k, v, selected_by, audit=audit, documents=documents, shares=shares)
        return output.out, output.statistics

    return attention
