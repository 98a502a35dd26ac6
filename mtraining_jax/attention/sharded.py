"""Selection and attention over a mesh: the one path of the public call, Flax and the trainer."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mtraining_jax.attention.inputs import AttentionInputs, AttentionOutput, AttentionSpec, Stats
from mtraining_jax.attention.placement import Placement, take
from mtraining_jax.documents import Documents
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import DATA_AXIS, SEQUENCE_AXES
from mtraining_jax.parallel.ring.ring_attention import schedule_over
from mtraining_jax.patterns.base import Pattern, register_pytrees
from mtraining_jax.patterns.dense import SlidingWindow
from mtraining_jax.selection import collectives
from mtraining_jax.selection.by_length import pairs_by_length
from mtraining_jax.selection.context import Selection, SelectionContext
from mtraining_jax.selection.metrics import causal_pairs, density, pairs_to_share
from mtraining_jax.utils.errors import UserError
from pallas_kernels import backends, names
from pallas_kernels.index import Index
from pallas_kernels.ops import scale_of
from pallas_kernels.schedule import attend as attend_with

register_pytrees()  # of patterns that were created before JAX was loaded


def attend(
    spec: AttentionSpec, q: Array, k: Array, v: Array, inputs: AttentionInputs
) -> AttentionOutput:
    """Computes attention over the pairs that `inputs.pattern` selects or lists.

    q, k, v: [B, S, Hq or Hk, D] in the order of `spec.layout`, after rotary embedding. Zeros extend
    a head dim without kernels, such as 96, to the next one with kernels, if these run.
    """
    pattern, placement = inputs.pattern, spec.placement
    assert pattern is not None
    head_dim = q.shape[-1]
    padding = backends.kernel_width(spec.backend, q, pattern.block_size) - head_dim
    if padding:
        spec = dataclasses.replace(spec, scale=scale_of(spec.scale, q))
        q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, padding))) for x in (q, k, v))
        output = attend(spec, q, k, v, inputs)
        return output._replace(out=output.out[..., :head_dim])
    if inputs.overrides and isinstance(pattern, Index):
        raise ValueError("overrides are options of a pattern, but pattern is an index")
    batch, documents = P(placement.batch), inputs.documents
    heads = P(placement.batch, placement.sequence, placement.heads)
    rows = P(placement.batch, placement.heads, placement.sequence)
    sharded_by_query = _sharded_by_query(inputs)
    index_spec = rows if sharded_by_query else P(placement.batch, placement.heads)
    pattern_spec = index_spec if isinstance(pattern, Index) else P(placement.heads)
    specs_of_inputs = {
        "pattern": pattern_spec,
        "overrides": batch,
        "observer": P(),
        "documents": batch if documents is None or documents.packed else P(),
        "sinks": P(placement.heads),
    }
    specs_of_output = {"out": heads, "lse": rows, "index": index_spec, "statistics": P()}
    order = None
    if sharded_by_query and spec.layout is not None and placement.ranks > 1:
        order = spec.layout.block_order()
        if isinstance(pattern, Index):
            pattern = jax.tree.map(lambda x: take(x, order, axis=2), pattern)
            inputs = dataclasses.replace(inputs, pattern=pattern)
    on_shard = dataclasses.replace(spec, placement=placement.remaining())
    output = placement.run(
        functools.partial(_attend_on_shard, on_shard),
        (heads, heads, heads, AttentionInputs(**cast(Any, specs_of_inputs))),
        AttentionOutput(**cast(Any, specs_of_output)),
        (q, k, v, inputs),
    )
    if order is None:
        return output
    back = functools.partial(take, order=np.argsort(order), axis=2)
    return output._replace(index=jax.tree.map(back, output.index))


def _attend_on_shard(
    spec: AttentionSpec, q: Array, k: Array, v: Array, inputs: AttentionInputs
) -> AttentionOutput:
    context = _context(spec, q, inputs)
    selection = _select(q, k, inputs, context)
    index = selection.index
    statistics: Stats = {}
    if spec.statistics:
        statistics = _measure(selection, context, spec.by_length)
        others = spec.placement.other_axes
        statistics = lax.pmean(statistics, others) if others else statistics
        statistics = lax.stop_gradient(statistics)
    how = spec.layout, spec.ring, q, k, v, index, spec.scale, spec.backend
    out, lse = attend_with(schedule_over(context.axis_names, *how), q, k, v, index)
    if inputs.observer is not None:
        observed = q, k, v, out, index, context, spec.placement.other_axes
        out, found = inputs.observer(*observed)
        statistics |= found
    if inputs.sinks is not None:
        out = _with_sinks(out, lse, inputs.sinks)
    return AttentionOutput(out, lse, index, statistics)


def _context(spec: AttentionSpec, q: Array, inputs: AttentionInputs) -> SelectionContext:
    """Describes the shard of queries [B, n, Hq, D] to a selection."""
    assert inputs.pattern is not None
    block_size, documents = inputs.pattern.block_size, inputs.documents
    if spec.layout is None or spec.placement.ranks == 1:
        axes, num_blocks = (), q.shape[1] // block_size
        block_ids = jnp.arange(num_blocks, dtype=jnp.int32)
    else:
        axes, num_blocks = spec.placement.sequence, spec.layout.num_blocks
        block_ids = spec.layout.block_ids(lax.axis_index(axes))
    if documents is None:
        documents = Documents.whole(num_blocks, block_size)
    elif not documents.packed:  # its boundaries become constants again
        valid_len, seq_len = documents.tokens[0, 0], num_blocks * block_size
        documents = Documents.padded(valid_len, seq_len, block_size)
    where, how = (block_ids, num_blocks, axes), (spec.scale, spec.backend, spec.causal)
    return SelectionContext(*where, *how, documents, overrides=inputs.overrides or {})


def _with_sinks(out_BSHD: Array, lse_BHS: Array, sinks_H: Array) -> Array:
    """Adds the weight of sinks to the sum that softmax divides by; differentiable in all."""
    # exp(lse) / (exp(lse) + exp(sink))
    kept_BHS = jax.nn.sigmoid(lse_BHS - sinks_H[:, None])
    return (out_BSHD * jnp.swapaxes(kept_BHS, 1, 2)[..., None]).astype(out_BSHD.dtype)


def _select(q: Array, k: Array, inputs: AttentionInputs, context: SelectionContext) -> Selection:
    pattern = inputs.pattern
    if isinstance(pattern, Pattern):
        with jax.named_scope("selection"):
            selection = select_pairs(pattern, q, k, context)
        promised, selected = _sharded_by_query(inputs), selection.index.sharded_by_query
        if selected != promised:
            raise UserError(
                f"{type(pattern).__name__} selected a {type(selection.index).__name__}, for which "
                f"its sharded_by_query() must return {selected}, not {promised}; add to the class: "
                f"def sharded_by_query(self, documents): return {selected}"
            )
        return selection
    assert pattern is not None
    if not context.documents.packed:
        return Selection(pattern)
    try:
        return Selection(pattern.within_documents(*context.documents.spans(), context.block_ids))
    except NotImplementedError as error:
        raise UserError(
            f"pattern: {error}; use a BlockMaskIndex, a DenseIndex with documents or a pattern"
        ) from error


def select_pairs(pattern: Pattern, q: Array, k: Array, context: SelectionContext) -> Selection:
    """Selects an index with a pattern; no gradient flows through it.

    The index has the checkpoint name `names.INDEX`. A rematerialization policy that saves this name
    avoids a second selection.

    Args:
        pattern: any pattern.
        q, k, context: as in `Pattern.select`.

    Raises:
        UserError: if there are documents, and the pattern does not support them, or if its
            `select` has other parameters or does not return a `Selection`.
        ValueError: if an option is overridden that the pattern reads only from its fields.
    """
    if context.documents.packed:
        pattern.check_documents()
    if unknown := context.overrides.keys() - pattern.overridable():
        names_of = ", ".join(sorted(unknown))
        raise ValueError(f"overrides of {names_of} are not supported by {type(pattern).__name__}")
    try:
        inspect.signature(pattern.select).bind(q, k, context)
    except TypeError:
        parameters = ", ".join(inspect.signature(type(pattern).select).parameters)
        raise UserError(
            f"{type(pattern).__name__} has select({parameters}); it must be "
            "select(self, q, k, context)"
        ) from None
    selection = pattern.select(*lax.stop_gradient((q, k)), context)
    name = type(pattern).__name__
    if not isinstance(selection, Selection) or not isinstance(selection.index, Index):
        found = type(selection).__name__
        if isinstance(selection, Selection):
            found += f" of {type(selection.index).__name__}"
        raise UserError(
            f"{name}.select returned {found}; it must return Selection(index, statistics), with an "
            "index such as BlockMaskIndex"
        )
    for field, needed in (("block_size", pattern.block_size), ("causal", context.causal)):
        if (value := getattr(selection.index, field)) != needed:
            raise UserError(
                f"{name}.select returned an index with {field}={value}; {field}={needed} is needed"
            )
    leaves, structure = jax.tree.flatten(selection.index)
    leaves = [checkpoint_name(lax.stop_gradient(leaf), names.INDEX) for leaf in leaves]
    return Selection(jax.tree.unflatten(structure, leaves), selection.statistics)


def select_index(
    q: Array,
    k: Array,
    pattern: Pattern,
    *,
    block_ids: Array,
    num_blocks: int,
    axis_names: Sequence[str] = (),
    scale: float | None = None,
    backend: str | None = None,
) -> Index:
    """Selects an index; the arguments are those of `select_pairs` and `SelectionContext`."""
    context = SelectionContext(block_ids, num_blocks, tuple(axis_names), scale, backend)
    return select_pairs(pattern, q, k, context).index


def _sharded_by_query(inputs: AttentionInputs) -> bool:
    pattern = inputs.pattern
    assert pattern is not None
    if isinstance(pattern, Index):
        return pattern.sharded_by_query
    documents = inputs.documents
    return pattern.sharded_by_query(documents is not None and documents.packed)


def _measure(selection: Selection, context: SelectionContext, by_length: bool) -> Stats:
    """Measures density and executed pairs, and adds the statistics of the pattern."""
    index, documents = selection.index, context.documents
    block_size = index.block_size
    seq_len = context.num_blocks * block_size
    total = pairs_to_share(seq_len, block_size, documents)
    rows = collectives.rows_of(context.block_ids, context.axis_names)
    numbers = {
        "density": density(index, seq_len, rows, documents),
        "executed": index.executed_pairs(seq_len, rows) / total,
        **selection.statistics,
    }
    if documents.packed:
        # In floating point: from 65536 tokens on, the pair count overflows an int32.
        share = documents.causal_pairs() / float(causal_pairs(seq_len))
        numbers |= {
            "document_pairs": share,
            "computed_pairs": numbers["density"] * share,
            "executed_pairs": numbers["executed"] * share,
        }
        if by_length:
            numbers |= pairs_by_length(index, rows, documents, seq_len)
    return {name: jnp.mean(x, dtype=jnp.float32) for name, x in numbers.items()}


def make_attention(
    mesh: Mesh,
    layout: Layout,
    pattern: Pattern,
    *,
    ring: str = "gather",
    backend: str | None = None,
    scale: float | None = None,
    by_length: bool = False,
) -> Callable[..., tuple[Array, Stats]]:
    """Builds the causal attention function of a model's layers.

    Args:
        mesh: mesh of `make_mesh`.
        layout: token order over the ranks of `SEQUENCE_AXES`.
        pattern: the default sparse pattern.
        ring: as in `Sharding`.
        backend, scale: as in `sparse_attention`.
        by_length: also count computed pairs by document length.

    Returns:
        A function `attention(q, k, v, inputs=AttentionInputs()) -> (out, stats)` of arrays in
        layout order, after rotary embedding, for use under `jax.jit`. stats are fp32 scalars,
        means over heads and batch: `density` (computed pairs over causal pairs within documents),
        `executed` (pairs in executed tiles over the same), and `Selection.statistics`. With
        documents also `document_pairs`, `computed_pairs` and `executed_pairs`, relative to all
        causal pairs of the sequence, and the counts of `pairs_by_length`.
        `inputs.observer` adds its own.
    """
    placement = Placement(mesh, (DATA_AXIS,), SEQUENCE_AXES)
    if placement.ranks != layout.num_ranks:
        raise ValueError(
            f"layout has num_ranks={layout.num_ranks}, but the mesh axes {SEQUENCE_AXES} have "
            f"{placement.ranks} devices"
        )
    spec = AttentionSpec(
        placement,
        layout,
        ring=ring,
        scale=scale,
        backend=backend,
        statistics=True,
        by_length=by_length,
    )

    def attention(
        q: Array, k: Array, v: Array, inputs: AttentionInputs | None = None
    ) -> tuple[Array, Stats]:
        if inputs is None or inputs.pattern is None:
            inputs = dataclasses.replace(inputs or AttentionInputs(), pattern=pattern)
        if inputs.window is not None:
            window = SlidingWindow(inputs.window, pattern.block_size)
            none = dict.fromkeys(("overrides", "observer", "window"))
            inputs = dataclasses.replace(inputs, pattern=window, **none)
        output = attend(spec, q, k, v, inputs)
        return output.out, output.statistics

    return attention
