"""Scores labels with a chunked output layer, without gradients; `loss.py` also computes those.

Losses by context length are in buckets: bucket k has the tokens at positions 2^k to 2^(k+1) - 1,
counted from 0; the first token has no loss.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mtraining_jax.models.fsdp import fsdp_apply
from mtraining_jax.models.labels import IGNORE_LABEL
from mtraining_jax.models.products import chunked, dot32, first_chunks
from mtraining_jax.parallel.mesh import REPLICATED
from mtraining_jax.utils.text import short_power


class LabelScores(NamedTuple):
    """Scores of labels, [B, S] each; 0 and False where a label is ignored."""

    loss: Array  # fp32, -log softmax(logits)[label] in nats
    is_argmax: Array  # whether the label has the (first) highest logit, as in greedy decoding


class ChunkScores(NamedTuple):
    """The output layer on C tokens: logits are fp32 [C, V], losses of ignored labels 0."""

    logits: Array
    lse: Array
    counted: Array
    labels: Array
    loss: Array


def score_chunk(hidden_CE: Array, weight_VE: Array, labels_C: Array) -> ChunkScores:
    """Computes logits and losses of C tokens, all in memory at once."""
    logits_CV = dot32("ce,ve->cv", hidden_CE, weight_VE)
    counted_C = labels_C != IGNORE_LABEL
    safe_C = jnp.where(counted_C, labels_C, 0)
    lse_C = jax.nn.logsumexp(logits_CV, axis=-1)
    picked_C = jnp.take_along_axis(logits_CV, safe_C[:, None], axis=-1)[:, 0]
    loss_C = jnp.where(counted_C, lse_C - picked_C, 0.0)
    return ChunkScores(logits_CV, lse_C, counted_C, safe_C, loss_C)


def label_scores(
    hidden_BSE: Array,
    weight_VE: Array,
    labels_BS: Array,
    *,
    chunk_size: int,
    mesh: Mesh | None = None,
    weight_spec: P = REPLICATED,
) -> LabelScores:
    """Scores every token without the full logits; arguments as in `loss.linear_cross_entropy`."""
    check_output_layer(hidden_BSE, weight_VE, labels_BS, chunk_size)

    def scores_of_shard(weight_VE: Array, hidden_BSE: Array, labels_BS: Array) -> LabelScores:
        batch, seq, width = hidden_BSE.shape
        tokens = batch * seq
        size = first_chunks(tokens, chunk_size, 1)

        def body(inputs: tuple[Array, Array]) -> LabelScores:
            scores = score_chunk(inputs[0], weight_VE, inputs[1])
            best_C = jnp.argmax(scores.logits, axis=-1)
            return LabelScores(scores.loss, scores.counted & (best_C == scores.labels))

        hidden_TE, labels_T = hidden_BSE.reshape(tokens, width), labels_BS.reshape(tokens)
        split = chunked(hidden_TE, size), chunked(labels_T, size, IGNORE_LABEL)
        scores = lax.map(body, split)
        return jax.tree.map(lambda x: x.reshape(-1)[:tokens].reshape(batch, seq), scores)

    weight_VE = weight_VE.astype(hidden_BSE.dtype)  # before the gather, which halves its traffic
    return fsdp_apply(
        scores_of_shard, weight_VE, hidden_BSE, labels_BS, specs=weight_spec, mesh=mesh
    )


def check_output_layer(
    hidden_BSE: Array, weight_VE: Array, labels_BS: Array, chunk_size: int
) -> None:
    """Checks shapes and `chunk_size`."""
    if hidden_BSE.shape[:2] != labels_BS.shape or hidden_BSE.shape[-1] != weight_VE.shape[1]:
        raise ValueError(
            f"hidden {hidden_BSE.shape}, weight {weight_VE.shape} and labels {labels_BS.shape} "
            "must be [B, S, E], [V, E] and [B, S]"
        )
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be at least 1")


def num_buckets(seq_len: int) -> int:
    """The number of buckets of a sequence; the last one may be partly filled."""
    if seq_len < 2:
        raise ValueError(f"seq_len={seq_len} must be at least 2")
    return (seq_len - 1).bit_length()


def bucket_names(count: int) -> list[str]:
    """The first positions of buckets 0 to `count` - 1 as text: 1, 2, 4, ... 512, 1K, ..."""
    return [short_power(2**k) for k in range(count)]


def sums_by_bucket(
    losses_BS: Array, labels_BS: Array, positions_BS: Array, buckets: int
) -> tuple[Array, Array]:
    """Sums losses, fp32 in nats, and counts labels, int32, by bucket of the predicting position.

    Returns [B, K] each, for K buckets.
    """
    # Exactly floor(log2(position of the label)).
    bucket_BS = 31 - lax.clz((positions_BS + 1).astype(jnp.int32))
    inside_KBS = bucket_BS == jnp.arange(buckets, dtype=jnp.int32)[:, None, None]
    counted_KBS = inside_KBS & (labels_BS != IGNORE_LABEL)
    sums_KB = jnp.sum(jnp.where(inside_KBS, losses_BS, 0.0), axis=2)
    return sums_KB.T, jnp.sum(counted_KBS, axis=2, dtype=jnp.int32).T


def means_by_bucket(losses: np.ndarray) -> tuple[list[float], list[int]]:
    """The mean loss and the number of tokens of each bucket, from fp32 [S - 1] of tokens 1 on."""
    edges = [2**k - 1 for k in range(num_buckets(len(losses) + 1))]
    parts = np.split(losses.astype(np.float64), edges[1:])
    return [float(part.mean()) for part in parts], [len(part) for part in parts]
