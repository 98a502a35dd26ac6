"""Audited training steps: they train as usual and also measure the error of sparse attention."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from mtraining_jax.attention.audit.figures import GRADIENT_FIGURES, AuditRows
from mtraining_jax.config import Config
from mtraining_jax.models.transformer import Attention
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.patterns.base import Pattern
from mtraining_jax.training.build import build_attention
from mtraining_jax.training.state import PRNG_IMPL, TrainState


@dataclasses.dataclass(frozen=True)
class StepAudit:
    """What `make_train_step` needs to audit a step.

    Attributes:
        draw: returns the rows to measure, given the state before the step; new ones each step.
        attention: builds the attention of the layers for some rows. That attention takes a `sink`;
            see `attention.auditing.Audit`.
        sinks: shape of the sinks of all layers, [L, Hq, 2].
    """

    draw: Callable[[TrainState], AuditRows]
    attention: Callable[[AuditRows], Attention]
    sinks: tuple[int, int, int]

    def differentiate(self, loss_of: Callable, attention_inputs: Any) -> Callable:
        """Adds the sinks to `jax.value_and_grad` of a loss.

        Args:
            loss_of: (trained, frozen, batch, count, attention, attention_inputs) -> loss, stats.
            attention_inputs: inputs of the step with one slice per layer, or None.

        Returns:
            (trained, frozen, batch, count, rows) -> (loss, stats), gradients by `trained`.
        """

        def loss(
            trained: Any, sinks: Array, frozen: Any, batch: Any, count: Array, rows: AuditRows
        ):
            audited = self.attention(rows)

            def attention(q: Array, k: Array, v: Array, given: tuple, **of_batch: Any):
                own, sink = given
                return audited(q, k, v, own, sink=sink, **of_batch)

            inputs = attention_inputs, sinks
            return loss_of(trained, frozen, batch, count, attention, inputs)

        both = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)

        def differentiate(trained: Any, frozen: Any, batch: Any, count: Array, rows: AuditRows):
            sinks = jnp.zeros(self.sinks, jnp.float32)
            found, (gradients, of_sinks) = both(trained, sinks, frozen, batch, count, rows)
            loss, layers = found
            figures = jnp.moveaxis(of_sinks, -1, 0)
            figures = layers["audit"] | dict(zip(GRADIENT_FIGURES, figures, strict=True))
            return (loss, layers | {"audit": figures}), gradients

        return differentiate


def make_step_audit(
    config: Config, mesh: Mesh, layout: Layout, pattern: Pattern
) -> StepAudit | None:
    """Builds the audit of a run's steps; None without audits or with dense attention."""
    if not config.audit.interval or not config.sparsity.pattern.sparse:
        return None
    seq_len, count = config.data.seq_len, config.audit.num_queries

    def draw(state: TrainState) -> AuditRows:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.rng, impl=PRNG_IMPL), state.step)
        # With documents, the end of a sequence is the end of one document, or padding.
        return AuditRows.draw(key, seq_len, count, last=not config.data.has_documents)

    attention = functools.partial(build_attention, config, mesh, layout, pattern)
    sinks = (config.model.num_layers, config.model.num_heads, len(GRADIENT_FIGURES))
    return StepAudit(draw, attention, sinks)
