"""Sparse attention for any model: one call, on one device or over a mesh."""

import functools

import jax
from jax import Array
from jax.sharding import Mesh
from jax.typing import ArrayLike

from mtraining_jax.attention import checks
from mtraining_jax.attention.order import global_order, ring_layout
from mtraining_jax.attention.placement import find_placement
from mtraining_jax.attention.sharded import Attended, Way, attend, join, split
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.ring import check_ring
from mtraining_jax.sparsity import Pattern, SampledRows
from mtraining_jax.sparsity.document_blocks import DocumentBlocks
from mtraining_jax.sparsity.documents import Documents
from pallas_kernels.index import Index

Axes = str | tuple[str, ...] | None


def sparse_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    pattern: Pattern | Index = SampledRows(),  # noqa: B008 (frozen)
    mesh: Mesh | None = None,
    layout: Layout | str | None = None,
    positions: ArrayLike | None = None,
    scale: float | None = None,
    causal: bool = True,
    backend: str | None = None,
    valid_len: ArrayLike | None = None,
    documents: Documents | None = None,
    return_lse: bool = False,
    return_index: bool = False,
    batch_axis: Axes = None,
    sequence_axes: Axes = None,
    head_axis: Axes = None,
    ring: str = "gather",
) -> Array | tuple:
    """Causal attention that computes only the pairs its pattern chooses, forward and backward.

    The index (which pairs) is chosen anew at every call from the queries and keys at hand, per
    batch entry and query head, and has the same bits for every number of devices. The softmax runs
    over the chosen pairs. Differentiable in q, k and v (no gradient flows through the choice);
    works under `jax.jit`, `jax.vmap` over the batch, `lax.scan`, `nnx.scan` and `jax.checkpoint`.
    A policy such as `jax.checkpoint_policies.save_only_these_names("sparse_index", "attn_out",
    "attn_lse")` keeps what the backward pass needs, so that nothing here is computed twice.

    Sources: the ring is Ring Attention (arXiv 2310.01889) over stripes of blocks; each pattern
    names its own.

    Args:
        q: [..., S, Hq, D], bfloat16, float16 or float32, position embedding applied. Leading
            axes, if any, are batch; over a mesh there is one.
        k: [..., S, Hk, D] in the dtype of q, Hq a multiple of Hk (grouped-query attention).
        v: shape and dtype of k.
        pattern: `SampledRows(...)` or another of the package, `Dense()`, or one of your own
            (`Pattern`); or an index, which is used as it is. S must be a multiple of its
            `block_size` times the devices of the sequence.
        mesh: devices that share the work, with axes of type Auto or Explicit. None: if q is
            sharded over Explicit axes, their mesh; if axes are named, the mesh of
            `jax.set_mesh`; else the arrays are those of one device (or of one shard, inside a
            `jax.shard_map` of your own).
        layout: the order of the tokens in q, k, v (and in the result). None or "contiguous": as
            they come in the sequence. "striped" or "zigzag": dealt to the devices of the sequence
            so that each has equal work (see `stripe`). Or a `Layout`.
        positions: int [S], the place in the sequence of each token of q, known when tracing
            (NumPy), instead of `layout`; on one device it may be any permutation.
        scale: of the logits, positive; default 1/sqrt(D).
        causal: False only with `Dense()` and an unsharded sequence; k may then have another
            length than q.
        backend: "mosaic_gpu" (Hopper GPU; head dim 64 or 128, 16-bit floats, block_size 128),
            "triton" (the same on GPUs from Ampere on, with the extra ampere), "xla" (anything), or
            None for the best that runs; on a GPU that falls back to "xla" one warning is logged.
        valid_len: integer, tokens of every sequence that count, where those behind are padding; may
            be traced. The choice then reads the last queries before the padding, and none of it.
            None: all count. Results for the padding mean nothing.
        documents: `Documents` that are packed into the sequences, of as many sequences as the
            leading axes of q have, or of one for all; their block size is that of the pattern. A
            query then sees its own document only, whose pairs are chosen as if it were alone;
            documents of fewer tokens than `pattern.dense_below` keep all of theirs. A block of no
            document gives output 0, lse -inf and gradients 0. For patterns that choose by
            documents (`for_documents`), which all of this package do but those that are not causal,
            and for a `BlockMaskIndex` or `DenseDocumentsIndex`, which is cut to the documents.
        return_lse: also give the log of the softmax's denominator, differentiable.
        return_index: also give the index, for `inspect` or for `pattern` of another call.
        batch_axis: mesh axes of the batch, () for none. Default: those q is sharded over, where
            its type says; else "data" if the mesh has it.
        sequence_axes: one or two mesh axes of the sequence, slowest first, () for none. Default:
            those q is sharded over, where its type says; else ("node", "device").
        head_axis: mesh axes of the heads, both query and key/value. Default: those q is sharded
            over, where its type says; else none.
        ring: how keys and values travel, with the same result. "gather": over the second of two
            sequence axes, or the only one, every device gathers those of all; over the first
            (between nodes, say) they pass round in a ring. "hierarchical": a ring over the second
            axis inside each step of the ring over the first. "flat": one ring over both axes.

    Returns:
        out, shape and dtype of q. With `return_lse` also lse, float32 [..., Hq, S], natural
        logarithm, -inf for a row without pairs (where out is 0). With `return_index` also the
        index, in positions of the sequence whatever the layout, arrays [B, Hq, ...] with B the
        product of the leading axes. In this order, as a tuple.

    Raises:
        ValueError: one sentence that names the argument and says what is allowed.
    """
    checks.check_arrays(q, k, v, causal)
    scale = checks.check_scale(scale, q)
    check_ring(ring)
    checks.check_pattern(pattern, q, causal)
    valid_len = checks.check_valid_len(valid_len, q.shape[-3], causal)
    block_size = pattern.block_size
    blocks = checks.check_documents(documents, q, block_size, causal, valid_len)
    placement = find_placement(q, mesh, batch_axis, sequence_axes, head_axis)
    checks.check_division(q, k, block_size, placement)
    seq_len, ranks = q.shape[-3], placement.ranks
    if not causal and ranks > 1:
        raise ValueError(
            f"causal=False needs an unsharded sequence, but sequence_axes={placement.sequence} "
            f"have {ranks} devices; use sequence_axes=()"
        )
    dealt, order = None, None
    if ranks > 1:
        dealt = ring_layout(layout, positions, seq_len, block_size, placement, ring)
    else:
        order = global_order(layout, positions, seq_len)
    lead = q.shape[:-3]
    q, k, v = (x.reshape(-1, *x.shape[-3:]) if x.ndim != 4 else x for x in (q, k, v))
    if order is not None:
        q, k, v = (placement.take(x, order[0]) for x in (q, k, v))
    way = Way(placement, dealt, ring, scale, causal, backend)
    arrays, static = split(pattern)
    found = _attend(way, static, q, k, v, arrays, valid_len, blocks)
    out, lse, index = found.out, found.lse, found.index
    if order is not None:
        out, lse = placement.take(out, order[1]), placement.take(lse, order[1], axis=2)
    if len(lead) != 1:
        out, lse = (x.reshape(*lead, *x.shape[1:]) for x in (out, lse))
    result = (out, *((lse,) if return_lse else ()), *((index,) if return_index else ()))
    return result if len(result) > 1 else out


# Compiled as one when called outside `jax.jit`, and traced once for all layers of a model inside.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend(
    way: Way, static: object, q: Array, k: Array, v: Array, arrays: list[Array],
    valid_len: Array | None, documents: DocumentBlocks | None,
) -> Attended:
    pattern = join(static, arrays)
    return attend(way, q, k, v, pattern, valid_len=valid_len, documents=documents)
