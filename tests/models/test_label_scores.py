import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mtraining_jax.models.label_scores import (
    bucket_names,
    label_scores,
    means_by_bucket,
    num_buckets,
    sums_by_bucket,
)
from mtraining_jax.models.labels import IGNORE_LABEL
from mtraining_jax.parallel.mesh import SEQUENCE_AXES, make_mesh

BATCH, SEQ, WIDTH, VOCAB = 2, 32, 16, 37


def example():
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(BATCH, SEQ, WIDTH)).astype(np.float32)
    weight = rng.normal(size=(VOCAB, WIDTH)).astype(np.float32)
    logits = hidden.astype(np.float64) @ weight.T.astype(np.float64)
    labels = rng.integers(0, VOCAB, (BATCH, SEQ)).astype(np.int32)
    labels[0, ::3] = logits[0, ::3].argmax(-1)  # some predicted labels
    labels[:, -1] = IGNORE_LABEL
    labels[1, :9] = IGNORE_LABEL
    lse = np.log(np.exp(logits).sum(-1))
    picked = np.take_along_axis(logits, np.maximum(labels, 0)[..., None], -1)[..., 0]
    losses = np.where(labels >= 0, lse - picked, 0)
    return hidden, weight, labels, losses, logits.argmax(-1) == labels


@pytest.mark.parametrize("chunk_size, on_mesh", [(5, False), (3, True)])
def test_losses_of_tokens_and_sums_by_position(chunk_size, on_mesh):
    hidden, weight, labels, losses, is_argmax = example()
    mesh = make_mesh(2, 2, 2) if on_mesh else None
    spread = {"mesh": mesh, "weight_spec": P(None, SEQUENCE_AXES)} if on_mesh else {}
    order = np.random.default_rng(1).permutation(SEQ)  # as in a layout
    positions = np.broadcast_to(order.astype(np.int32), labels.shape)

    @jax.jit
    def score(hidden, weight, labels):
        scores = label_scores(hidden, weight, labels, chunk_size=chunk_size, **spread)
        return scores, sums_by_bucket(scores.loss, labels, positions, num_buckets(SEQ))

    scores, (sums, counts) = score(hidden[:, order], jnp.asarray(weight), labels[:, order])
    assert scores.loss.dtype == jnp.float32
    np.testing.assert_allclose(scores.loss, losses[:, order], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(scores.is_argmax, is_argmax[:, order])
    assert 8 < int(np.sum(scores.is_argmax)) < 40
    for k in range(5):
        # The token that predicts position p is at p - 1.
        inside = slice(2**k - 1, 2 ** (k + 1) - 1)
        np.testing.assert_array_equal(counts[:, k], np.sum(labels[:, inside] >= 0, axis=1))
        np.testing.assert_allclose(sums[:, k], losses[:, inside].sum(1), rtol=1e-5)
    assert int(np.sum(counts)) == np.sum(labels >= 0)


def test_the_last_chunk_of_62_tokens_is_padded():
    hidden, weight, *others = example()
    hidden, labels, losses, is_argmax = (x[:, :31] for x in (hidden, *others))
    scores = jax.jit(functools.partial(label_scores, chunk_size=16))(hidden, weight, labels)
    np.testing.assert_allclose(scores.loss, losses, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(scores.is_argmax, is_argmax)


def test_buckets_of_one_sequence_are_those_of_a_batch():
    losses = np.arange(11, dtype=np.float32)  # of positions 1 to 11
    means, counts = means_by_bucket(losses)
    assert counts == [1, 2, 4, 4] and means == [0, 1.5, 4.5, 8.5]
    labels, positions = jnp.zeros((1, 11), jnp.int32), jnp.arange(11)[None]
    sums, numbers = sums_by_bucket(jnp.asarray(losses)[None], labels, positions, num_buckets(12))
    assert numbers.tolist() == [counts]
    assert (sums / numbers).tolist() == [means]
    assert [num_buckets(n) for n in (2, 3, 4, 5, 1024, 1025)] == [1, 2, 2, 3, 10, 11]
    assert bucket_names(12)[-3:] == ["512", "1K", "2K"] and bucket_names(21)[-1] == "1M"
    with pytest.raises(ValueError, match="seq_len=1 must be at least 2"):
        num_buckets(1)


def test_shapes_that_do_not_fit_are_refused():
    hidden, weight, labels, _, _ = example()
    with pytest.raises(ValueError, match="must be \\[B, S, E\\], \\[V, E\\] and \\[B, S\\]"):
        label_scores(hidden, weight.T, labels, chunk_size=8)
    with pytest.raises(ValueError, match="chunk_size=0"):
        label_scores(hidden, weight, labels, chunk_size=0)
