"""Compares the gradient of all parameters under sparse and under dense attention.

It uses only the first tokens of the step's sequences, because dense attention over full sequences
would take longer than the step. A pattern keeps a larger fraction of a short sequence, so the
result is a lower bound on the gradient error of full sequences.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtraining_jax.attention.inputs import AttentionInputs
from mtraining_jax.config import Config
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import DOCUMENTS, TOKENS
from mtraining_jax.parallel.replicas import constrain
from mtraining_jax.patterns.dense import Dense
from mtraining_jax.training.build import build_attention, build_layout, build_pattern
from mtraining_jax.training.state import StateBuilder, TrainState
from mtraining_jax.training.step import Batch, make_gradients

# Prefix of the stacked layer parameters, which have a leading layer axis.
_LAYERS = "layers."


def make_gradient_comparison(
    config: Config, builder: StateBuilder, mesh: Mesh, layout: Layout
) -> Callable[[TrainState, Batch], dict[str, Array]]:
    """Jits a function (state, batch) -> `compared` gradients of one micro-batch."""
    short = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, seq_len=config.gradient_tokens),
        optimizer=dataclasses.replace(config.optimizer, accumulation_steps=1),
    )
    short_layout, pattern = build_layout(short), build_pattern(short)
    sparse_gradients, dense_gradients = (
        make_gradients(
            short, builder, build_attention(short, mesh, short_layout, x), AttentionInputs(x)
        )
        for x in (pattern, Dense(pattern.block_size))
    )
    replicas, parts = config.parallel.replicas, config.optimizer.accumulation_steps

    def compare(state: TrainState, batch: Batch) -> dict[str, Array]:
        trained, frozen = builder.split(state.model)
        first = {
            # The first micro-batch of each replica.
            name: x.reshape(replicas, parts, -1, *x.shape[1:])[:, 0].reshape(-1, *x.shape[1:])
            for name, x in batch.items()
        }
        batch = shortened(first, layout, short_layout, mesh)
        _, sparse, _ = sparse_gradients(trained, frozen, batch, None)
        batch.pop("mass_fraction", None)
        _, dense, _ = dense_gradients(trained, frozen, batch, None)
        return compared(sparse, dense)

    return jax.jit(compare, out_shardings=NamedSharding(mesh, P()))


def shortened(batch: Batch, layout: Layout, short: Layout, mesh: Mesh) -> Batch:
    """Cuts a batch to its first tokens, in the order of a shorter layout on the same ranks."""
    places = layout.inverse()[short.permutation()]
    blocks, size = short.num_blocks, short.block_size

    def cut(name: str, x: Array) -> Array:
        if name == "mass_fraction":
            return x
        if name == "documents":
            first, end, tokens = (x[:, :blocks, i] for i in range(3))
            inside = jnp.maximum(blocks - first, 0) * size
            parts = jnp.minimum(first, blocks), jnp.minimum(end, blocks)
            x = jnp.stack([*parts, jnp.minimum(tokens, inside)], -1)
            return constrain(x, mesh, DOCUMENTS)
        x = jnp.take(x, places, axis=1, unique_indices=True, mode="clip")
        return constrain(x, mesh, TOKENS)

    return {name: cut(name, x) for name, x in batch.items()}


def compared(sparse: dict[str, Array], dense: dict[str, Array]) -> dict[str, Array]:
    """Compares two gradients by name; NaN where the dense one is 0.

    Returns `global_gradient_cosine`; `global_gradient_ratio`, the norm of the sparse one over that
    of the dense one; and, where layers are trained, `global_gradient_cosine_per_layer` fp32 [L].
    """
    largest = jnp.stack([jnp.max(jnp.abs(x)) for x in dense.values()]).max()
    # Scaled, because squares of small numbers would underflow.
    scale = jnp.where(largest > 0, 1 / largest, 1)
    sparse, dense = ({name: x * scale for name, x in one.items()} for one in (sparse, dense))

    def cosine_and_ratio(names: list[str], per_layer: bool) -> tuple[Array, Array]:
        def product(a: dict[str, Array], b: dict[str, Array]) -> Array:
            axes = (tuple(range(1, a[name].ndim)) if per_layer else None for name in names)
            products = (jnp.sum(a[n] * b[n], axis=x) for n, x in zip(names, axes, strict=True))
            return jnp.asarray(sum(products))

        dot, a, b = product(sparse, dense), product(sparse, sparse), product(dense, dense)
        cosine = jnp.where(a > 0, dot / (jnp.sqrt(a) * jnp.sqrt(b)), jnp.where(b > 0, 0, jnp.nan))
        return cosine, jnp.sqrt(a) / jnp.sqrt(b)

    cosine, ratio = cosine_and_ratio(list(dense), per_layer=False)
    found = {"global_gradient_cosine": cosine, "global_gradient_ratio": ratio}
    if of_layers := [name for name in dense if name.startswith(_LAYERS)]:
        found["global_gradient_cosine_per_layer"], _ = cosine_and_ratio(of_layers, per_layer=True)
    return found
