"""Audited training steps: they train as usual and also measure the error of sparse attention."""

import jax
import jax.numpy as jnp
from jax import Array

from mtraining_jax.attention.audit.figures import GRADIENT_FIGURES, AuditRows
from mtraining_jax.config import Config
from mtraining_jax.training.state import PRNG_IMPL, TrainState


def audits_steps(config: Config) -> bool:
    """Whether steps of a run are audited; dense attention is not."""
    return bool(config.audit.interval) and config.sparsity.pattern.sparse


def draw_rows(config: Config, state: TrainState) -> AuditRows:
    """Draws the queries to measure, given the state before the step; new ones for each step."""
    key = jax.random.fold_in(jax.random.wrap_key_data(state.rng, impl=PRNG_IMPL), state.step)
    # With documents, the end of a sequence is the end of one document, or padding.
    last = not config.data.has_documents
    return AuditRows.draw(key, config.data.seq_len, config.audit.num_queries, last=last)


def zero_taps(config: Config) -> Array:
    """Returns the `grad_tap` of all layers, [L, Hq, 2]."""
    model = config.model
    return jnp.zeros((model.num_layers, model.num_heads, len(GRADIENT_FIGURES)), jnp.float32)


def add_gradient_figures(layers: dict, of_taps: Array) -> dict:
    """Adds the cotangents of the taps to the audit in the statistics of layers."""
    figures = dict(zip(GRADIENT_FIGURES, jnp.moveaxis(of_taps, -1, 0), strict=True))
    return layers | {"audit": layers["audit"] | figures}
