"""Sparse attention in Flax Linen's own attention module, trained for a few steps.

    python examples/linen_attention.py

Only the line with `attention_fn=` differs from dense attention. It takes seconds on a CPU.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from mtraining_jax import SampledRows, attention_fn

VOCABULARY, TOKENS, FEATURES = 32, 256, 32

# Small enough for 256 tokens. For long sequences use the default, SampledRows().
PATTERN = SampledRows(block_size=32, tau=0.5)


class Model(nn.Module):
    """Predicts the next token with one attention layer."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Tokens int32 [B, S] to logits [B, S, vocabulary]."""
        x = nn.Embed(VOCABULARY, FEATURES)(tokens)
        attention = nn.MultiHeadDotProductAttention(
            num_heads=4, attention_fn=attention_fn(pattern=PATTERN)
        )
        return nn.Dense(VOCABULARY)(x + attention(nn.RMSNorm()(x)))


model = Model()
optimizer = optax.adam(1e-2)


@jax.jit
def train_step(params, state, tokens: jax.Array):
    """One step on tokens int32 [B, S + 1]: parameters, optimizer state and the loss before it."""

    def loss(params) -> jax.Array:
        logits = model.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    updates, state = optimizer.update(gradients, state)
    return optax.apply_updates(params, updates), state, value


def batch(step: int) -> jax.Array:
    """Sequences that count up by 1, 2 or 3 from a random token, int32 [2, S + 1]."""
    start, stride = jax.random.split(jax.random.key(step))
    start = jax.random.randint(start, (2, 1), 0, VOCABULARY)
    stride = jax.random.randint(stride, (2, 1), 1, 4)
    return (start + stride * jnp.arange(TOKENS + 1)) % VOCABULARY


def main(steps: int) -> list[float]:
    """Trains and prints; returns the losses."""
    params = jax.jit(model.init)(jax.random.key(0), batch(0)[:, :-1])
    state = optimizer.init(params)
    losses = []
    for step in range(steps):
        params, state, value = train_step(params, state, batch(step))
        losses.append(float(value))
        print(f"step {step:3d}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    main(parser.parse_args().steps)
