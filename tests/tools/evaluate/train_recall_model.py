"""Trains the tiny model of tests/checkpoints/recall_tiny.

    python -m tests.tools.evaluate.train_recall_model FOLDER

Two layers of width 64 learn to recall the value of a key anywhere in the context (the task mqar
with 64 ids). This takes about two minutes on two CPU cores.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from mtraining_jax.models.spec import ModelSpec
from mtraining_jax.models.transformer import init_model
from mtraining_jax.tools.export.write import save_hf

VOCAB, MAX_LENGTH = 64, 256
SPEC = ModelSpec(
    vocab_size=VOCAB, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=32,
    intermediate_size=128, rope_theta=10000.0, max_position_embeddings=MAX_LENGTH,
    tie_word_embeddings=True, dtype="float32", remat="none", initializer_range=0.05,
)  # fmt: skip
# Length, sequences per batch, steps, and whether to train the task or copying. A model that copies
# has the heads that recall needs, and copying trains on every token of the second half.
STAGES = ((64, 32, 600, "copy"), (64, 32, 500, "recall"), (256, 8, 300, "recall"))


def copy_batch(rng, length, rows):
    """Random tokens that repeat with a different period in each row: int32 [rows, length] each."""
    period = rng.integers(length // 8, length // 2, (rows, 1))
    tokens = np.take_along_axis(
        rng.integers(0, VOCAB, (rows, length)), np.arange(length) % period, axis=1
    )
    labels = np.where(np.arange(length) >= period, np.roll(tokens, -1, axis=1), -100)
    labels[:, -1] = -100
    return tokens.astype(np.int32), labels.astype(np.int32)


def batch(rng, length, rows, pairs):
    """Tokens and labels of `mqar`: int32 [rows, length] each.

    Every second position of the second half has a question, so keys are queried several times,
    which speeds up learning.
    """
    filler, keys = VOCAB // 2, VOCAB // 4
    tokens = rng.integers(0, filler, (rows, length))
    labels = np.full((rows, length), -100)
    for row in range(rows):
        key = filler + rng.permutation(keys)[:pairs]
        value = filler + keys + rng.integers(0, VOCAB - filler - keys, pairs)
        written = 2 * rng.permutation(length // 4)[:pairs]
        tokens[row, written], tokens[row, written + 1] = key, value
        asked, which = length // 2 + 2 * np.arange(length // 4), rng.integers(0, pairs, length // 4)
        tokens[row, asked], tokens[row, asked + 1] = key[which], value[which]
        labels[row, asked] = value[which]
    return tokens.astype(np.int32), labels.astype(np.int32)


def attention(q, k, v):
    """Exact attention without blocks."""
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    causal = np.tri(q.shape[1], dtype=bool)
    weights = jax.nn.softmax(jnp.where(causal, logits, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v), {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    graphdef, state = init_model(SPEC, seed=arguments.seed)
    total = sum(steps for _, _, steps, _ in STAGES)
    schedule = optax.warmup_cosine_decay_schedule(0, 5e-3, 50, total, 1e-4)
    adamw = optax.adamw(schedule, weight_decay=0.01)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    moments = optimizer.init(state)

    @jax.jit
    def step(state, moments, tokens, labels):
        def loss_of(state):
            model = nnx.merge(graphdef, state)
            hidden, _ = model(tokens, jnp.arange(tokens.shape[1]), attention)
            logits = model.logits(hidden)
            counted = labels >= 0
            safe = jnp.where(counted, labels, 0)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, safe)
            right = jnp.argmax(logits, -1) == labels
            return (
                jnp.sum(jnp.where(counted, losses, 0)) / counted.sum(),
                jnp.sum(right & counted) / counted.sum(),
            )

        (loss, right), gradients = jax.value_and_grad(loss_of, has_aux=True)(state)
        updates, moments = optimizer.update(gradients, moments, state)
        return optax.apply_updates(state, updates), moments, loss, right

    rng, begin = np.random.default_rng(arguments.seed), time.perf_counter()
    for length, rows, steps, what in STAGES:
        for number in range(1, steps + 1):
            if what == "copy":
                tokens, labels = copy_batch(rng, length, rows)
            else:
                tokens, labels = batch(rng, length, rows, pairs=int(rng.integers(2, 9)))
            state, moments, loss, right = step(state, moments, tokens, labels)
            if number % 100 == 0:
                seconds = time.perf_counter() - begin
                values = f"loss {loss:.3f}, right {right:.1%}, {seconds:.0f} s"
                print(f"{what}, {length} tokens, step {number}: {values}", flush=True)
    save_hf(arguments.folder, SPEC, state, replace=True)


if __name__ == "__main__":
    main()
