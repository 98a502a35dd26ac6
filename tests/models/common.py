import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mtraining_jax.models.spec import ModelSpec
from mtraining_jax.models.transformer import graph_definition, init_model
from tests.models.reference_attention import dense_attention

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"


def tiny_spec(**changes) -> ModelSpec:
    values = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "remat": "none",
        # Large enough that every part of the network affects the output.
        "initializer_range": 0.2,
    }
    return ModelSpec(**(values | changes))


def some_tokens(spec: ModelSpec, shape=(2, 16), seed=0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, spec.vocab_size, shape), jnp.int32)


def next_token_loss(graphdef, state, tokens, attention=None, mesh=None):
    """Mean cross entropy of the next token; also logits and stats."""
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    model = nnx.merge(graphdef, state)
    attention = attention or dense_attention(positions)
    hidden, stats = model(tokens, positions, attention, mesh=mesh)
    logits = model.logits(hidden)
    log_probabilities = jax.nn.log_softmax(logits[:, :-1])
    picked = jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], axis=-1)
    return -picked.mean(), (logits, stats)


@functools.partial(jax.jit, static_argnums=0)
def forward(graphdef, state, tokens, positions):
    """Hidden states and logits with dense attention."""
    model = nnx.merge(graphdef, state)
    hidden, _ = model(tokens, positions, dense_attention(positions))
    return hidden, model.logits(hidden)


def drawn(spec: ModelSpec):
    """Graph definition and state from seed 0, compiled once for all tests of a process.

    Models that differ only in their computation share a state.
    """
    plain = dataclasses.replace(spec, dtype="float32", remat="none", mlp_kept_chunks=0)
    return graph_definition(spec), _state(plain)


@functools.cache
def _state(spec: ModelSpec):
    return init_model(spec, seed=0)[1]


def equations(jaxpr):
    """All equations, including those of inner jaxprs."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for item in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(item, "jaxpr", item)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def assert_states_close(actual, expected, tolerance: float) -> None:
    """Every leaf within `tolerance` times its largest expected entry; 0 means bit-identical."""
    actual, expected = nnx.to_pure_dict(actual), nnx.to_pure_dict(expected)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    others = dict(jax.tree_util.tree_leaves_with_path(expected))
    for path, leaf in jax.tree_util.tree_leaves_with_path(actual):
        other = np.asarray(others[path])
        np.testing.assert_allclose(
            np.asarray(leaf),
            other,
            rtol=0,
            atol=tolerance * np.abs(other).max(),
            err_msg=jax.tree_util.keystr(path),
        )
