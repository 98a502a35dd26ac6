"""Cross entropy fused with the output layer, in chunks of tokens.

The logits of a long sequence do not fit in memory (S = 524288, V = 151936: 297 GiB in fp32), so
each device discards those of a chunk after taking the loss and both gradients from them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mtraining_jax.models.fsdp import gather_weight, reduce_gradient
from mtraining_jax.models.label_scores import check_output_layer, score_chunk
from mtraining_jax.models.labels import IGNORE_LABEL
from mtraining_jax.models.products import chunked, dot, dot32, first_chunks
from mtraining_jax.parallel.mesh import ACTIVATIONS, AXES, REPLICATED, TOKENS
from mtraining_jax.parallel.replicas import remaining_axes, shard_map_remaining


def count_labels(labels: Array) -> Array:
    """The number of labels that the loss counts, an int32 scalar."""
    return jnp.sum(labels != IGNORE_LABEL, dtype=jnp.int32)


def linear_cross_entropy(
    hidden_BSE: Array,
    weight_VE: Array,
    labels_BS: Array,
    *,
    chunk_size: int,
    mesh: Mesh | None = None,
    weight_spec: P = REPLICATED,
    label_weights_BS: Array | None = None,
    trains_weight: bool = True,
) -> Array:
    """Sums -log softmax(hidden @ weight.T)[label] over counted labels, without the full logits.

    Divide by `count_labels` of the whole batch for a mean; the reference implementation divides by
    S, although the last token has no label. Logits and the sum are fp32; products use the dtype of
    `hidden_BSE`, also for gradients of the logits. The weight's gradient accumulates in fp32.

    Args:
        hidden_BSE: fp32 or bf16.
        weight_VE: fp32, or of any dtype if it is not trained.
        labels_BS: int32 [B, S], ids below V, or `IGNORE_LABEL`.
        chunk_size: number of tokens per device with logits in memory at a time.
        mesh: shards B over 'data' and S over ('node', 'device'), in any token order; or None.
        weight_spec: sharding of the weight and its gradient.
        label_weights_BS: fp32 [B, S], optional weights of the labels.
        trains_weight: whether to compute the gradient of the weight; otherwise it has none.

    Returns:
        fp32 scalar, differentiable in `hidden_BSE` and `weight_VE`; in `per_replica`, of a replica.
    """
    check_output_layer(hidden_BSE, weight_VE, labels_BS, chunk_size)
    targets = (labels_BS,) if label_weights_BS is None else (labels_BS, label_weights_BS)
    how = chunk_size, mesh, weight_spec, trains_weight
    return _summed(hidden_BSE, weight_VE, targets, *how)


# `targets` are the labels and, optionally, their weights.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _summed(hidden, weight, targets, chunk_size, mesh, weight_spec, trains_weight):
    how = chunk_size, mesh, weight_spec, trains_weight
    return _summed_fwd(hidden, weight, targets, *how)[0]


@jax.named_scope("loss")
def _summed_fwd(hidden, weight, targets, chunk_size, mesh, weight_spec, trains_weight):
    local = functools.partial(_local, chunk_size=chunk_size, trains_weight=trains_weight)
    weight = weight.astype(hidden.dtype)  # before the gather, which halves its traffic
    if mesh is None:
        return local(hidden, weight, targets)

    axes = remaining_axes(AXES)

    def summed_over_devices(hidden, weight, targets):
        full_weight = gather_weight(weight, weight_spec)
        loss, (d_hidden, d_weight) = local(hidden, full_weight, targets)
        if d_weight is not None:
            d_weight = reduce_gradient(d_weight, weight_spec, axes)
        return lax.psum(loss, axes), (d_hidden, d_weight)

    in_specs, out_specs = (ACTIVATIONS, weight_spec, TOKENS), (P(), (ACTIVATIONS, weight_spec))
    on_mesh = shard_map_remaining(summed_over_devices, mesh, in_specs, out_specs)
    return on_mesh(hidden, weight, targets)


def _summed_bwd(chunk_size, mesh, weight_spec, trains_weight, gradients, d_loss):
    d_hidden, d_weight = gradients
    # d_loss is 1 / tokens: in bf16 it would bias all gradients by up to 0.4 %.
    d_hidden = (d_hidden.astype(jnp.float32) * d_loss).astype(d_hidden.dtype)
    return d_hidden, d_weight * d_loss if trains_weight else None, None


_summed.defvjp(_summed_fwd, _summed_bwd)


def _local(hidden_BSE, weight_VE, targets, *, chunk_size, trains_weight) -> tuple[Array, Any]:
    """The sum for the tokens of one device, and its gradients, without communication."""
    dtype, (batch, seq, width) = hidden_BSE.dtype, hidden_BSE.shape
    tokens = batch * seq
    size = first_chunks(tokens, chunk_size, 1)
    hidden = chunked(hidden_BSE.reshape(tokens, width), size)
    labels, *weights = (x.reshape(tokens) for x in targets)
    targets = chunked(labels, size, IGNORE_LABEL), *(chunked(x, size) for x in weights)

    def body(carry, inputs) -> tuple[Any, Any]:
        hidden_CE, (labels_C, *weights_C) = inputs
        scores = score_chunk(hidden_CE, weight_VE, labels_C)
        loss = jnp.sum(scores.loss * weights_C[0] if weights_C else scores.loss)
        total, d_weight_VE = carry
        probabilities_CV = jnp.exp(scores.logits - scores.lse[:, None])
        is_label_CV = jnp.arange(weight_VE.shape[0]) == scores.labels[:, None]
        d_logits_CV = jnp.where(scores.counted[:, None], probabilities_CV - is_label_CV, 0.0)
        if weights_C:
            d_logits_CV = d_logits_CV * weights_C[0][:, None]
        d_logits_CV = d_logits_CV.astype(dtype)
        d_hidden_CE = dot("cv,ve->ce", d_logits_CV, weight_VE)
        if trains_weight:
            d_weight_VE = d_weight_VE + dot32("cv,ce->ve", d_logits_CV, hidden_CE)
        return (total + loss, d_weight_VE), d_hidden_CE

    zeros = jnp.zeros(weight_VE.shape, jnp.float32) if trains_weight else None
    start = (jnp.zeros((), jnp.float32), zeros)
    (total, d_weight), d_hidden = lax.scan(body, start, (hidden, targets))
    d_hidden = d_hidden.reshape(-1, width)[:tokens]
    return total, (d_hidden.reshape(hidden_BSE.shape), d_weight)
