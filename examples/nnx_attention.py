"""Sparse attention in Flax NNX's own attention module, trained for a few steps.

    python examples/nnx_attention.py

Only the line with `attention_fn=` differs from dense attention. It takes seconds on a CPU.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mtraining_jax import SampledRows, attention_fn

VOCABULARY, TOKENS, FEATURES = 32, 256, 32

# Small enough for 256 tokens. For long sequences use the default, SampledRows().
PATTERN = SampledRows(block_size=32, tau=0.5)


class Model(nnx.Module):
    """Predicts the next token with one attention layer."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, FEATURES, rngs=rngs)
        self.norm = nnx.RMSNorm(FEATURES, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=4,
            num_kv_heads=2,
            in_features=FEATURES,
            decode=False,
            attention_fn=attention_fn(pattern=PATTERN),
            rngs=rngs,
        )
        self.logits = nnx.Linear(FEATURES, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Tokens int32 [B, S] to logits [B, S, vocabulary]."""
        x = self.embed(tokens)
        return self.logits(x + self.attention(self.norm(x)))


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    """One step on tokens int32 [B, S + 1]; returns the loss before it."""

    def loss(model: Model) -> jax.Array:
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def batch(step: int) -> jax.Array:
    """Sequences that count up by 1, 2 or 3 from a random token, int32 [2, S + 1]."""
    start, stride = jax.random.split(jax.random.key(step))
    start = jax.random.randint(start, (2, 1), 0, VOCABULARY)
    stride = jax.random.randint(stride, (2, 1), 1, 4)
    return (start + stride * jnp.arange(TOKENS + 1)) % VOCABULARY


def main(steps: int) -> list[float]:
    """Trains and prints; returns the losses."""
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    losses = []
    for step in range(steps):
        losses.append(float(train_step(model, optimizer, batch(step))))
        print(f"step {step:3d}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    main(parser.parse_args().steps)
