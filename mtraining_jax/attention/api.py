"""The public `sparse_attention` function, for one device or a mesh."""

import jax
from jax import Array
from jax.typing import ArrayLike

from mtraining_jax.attention import checks
from mtraining_jax.attention.inputs import AttentionInputs, AttentionSpec, Residuals
from mtraining_jax.attention.order import global_order, ring_layout
from mtraining_jax.attention.placement import Sharding, find_placement, take
from mtraining_jax.attention.sharded import attend
from mtraining_jax.documents import Documents
from mtraining_jax.patterns.base import Pattern
from mtraining_jax.patterns.sampled_rows import SampledRows
from pallas_kernels.index import Index


@jax.numpy_rank_promotion("allow")
@jax.numpy_dtype_promotion("standard")
def sparse_attention(
    q: Array,
    k: Array,
    v: Array,
    pattern: Pattern | Index = SampledRows(),  # noqa: B008 (frozen)
    *,
    documents: Documents | None = None,
    sharding: Sharding | None = None,
    scale: float | None = None,
    causal: bool = True,
    sinks: ArrayLike | None = None,
    backend: str | None = None,
    return_residuals: bool = False,
) -> Array | tuple[Array, Residuals]:
    """Computes causal attention over the query-key pairs that a pattern selects.

    The index (the set of selected pairs) is computed in every call from q and k, per sequence and
    query head. It is bit-identical on any number of devices. Differentiable in q, k and v; no
    gradient flows through the selection. Works under `jax.jit`, `jax.vmap` over the batch,
    `lax.scan`, `nnx.scan` and `jax.checkpoint`. The policy
    `jax.checkpoint_policies.save_only_these_names("sparse_index", "attn_out", "attn_lse")` saves
    everything the backward pass needs, so neither selection nor attention is recomputed.

    Source: Ring Attention (arXiv 2310.01889). Each pattern names its own source.

    Args:
        q: [..., S, Hq, D] queries after position embedding; bfloat16, float16 or float32. Leading
            axes are batch axes; with a mesh, at most one.
        k: [..., S, Hk, D] keys, same dtype as q. Hq must be a multiple of Hk (grouped-query
            attention).
        v: [..., S, Hk, D] values, same dtype as k.
        pattern: a `Pattern` (`SampledRows(...)`, `Dense()`, a custom one, ...) or an index to use
            unchanged. S must be a multiple of `block_size` times the number of devices that shard
            the sequence.
        documents: `Documents` packed into the sequences: one row per sequence, or one for all.
            Must have the pattern's block size. Queries attend only to their own document, and
            pairs are selected per document. Documents shorter than `pattern.min_sparse_tokens`
            use dense attention. Blocks without a document get output 0, lse -inf and zero
            gradients. Requires a pattern with `supports_documents` (every causal pattern of this
            package), or a `BlockMaskIndex` or `DenseIndex` with documents. `Documents.padded` says
            where the padding of every sequence begins, for any causal pattern or index.
        sharding: mesh, its axes, and token order of the arrays. None reads mesh and axes from
            their types (Explicit axes), else they belong to a single device or shard.
        scale: positive scale of the logits; defaults to 1/sqrt(D).
        causal: False requires `Dense()` and an unsharded sequence; k may then have another length
            than q.
        sinks: floats [Hq], logits of attention sinks (gpt-oss): each query head attends to one more
            key, with this logit and without a value. Differentiable; they do not change which pairs
            are selected.
        backend: "mosaic_gpu" (Hopper GPU; head dim 64, 128, 192 or 256, 16-bit floats,
            block_size 128), "triton" (the same on Ampere or newer, head dim 64 or 128; needs the
            `triton` extra), "xla" (any device), or None for the fastest available one. A fallback
            to "xla" on a GPU logs one warning.
        return_residuals: also return the log-sum-exp of the logits, differentiable, and the index,
            for `inspect`, or for another call that takes it in place of a pattern.

    Returns:
        out [..., S, Hq, D] in the dtype of q; with `return_residuals` a pair of out and
        `Residuals(lse, index)`. Rows without pairs have out 0 and lse -inf.

    Raises:
        ValueError: if an argument is invalid; the message names it and what is allowed.
    """
    checks.check_arrays(q, k, v, causal)
    scale = checks.check_scale(scale, q)
    sharding = checks.check_sharding(sharding)
    checks.check_pattern(pattern, q, causal)
    block_size = pattern.block_size
    documents = checks.check_documents(documents, q, block_size, causal)
    placement = find_placement(q, sharding)
    checks.check_division(q, k, block_size, placement, causal)
    batch_shape, seq_len = q.shape[:-3], q.shape[-3]
    shard_layout, order = None, None
    if placement.ranks > 1:
        shard_layout = ring_layout(sharding.order, seq_len, block_size, placement, sharding.ring)
    else:
        order = global_order(sharding.order, seq_len)
    q, k, v = (x.reshape(-1, *x.shape[-3:]) if x.ndim != 4 else x for x in (q, k, v))
    if order is not None:
        q, k, v = (take(x, order[0]) for x in (q, k, v))
    spec = AttentionSpec(placement, shard_layout, sharding.ring, scale, causal, backend)
    inputs = AttentionInputs(
        pattern=pattern, documents=documents, sinks=checks.check_sinks(sinks, q)
    )
    out, lse, index, _ = _attend(spec, q, k, v, inputs)
    if order is not None:
        out, lse = take(out, order[1]), take(lse, order[1], axis=2)
    if len(batch_shape) != 1:
        out, lse = (x.reshape(*batch_shape, *x.shape[1:]) for x in (out, lse))
    return (out, Residuals(lse, index)) if return_residuals else out


# Jitted as a whole for eager calls; under `jax.jit` it is traced once for all layers of a model.
_attend = jax.jit(attend, static_argnums=0)
