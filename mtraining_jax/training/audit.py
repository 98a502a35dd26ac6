"""A training step that measures what its sparse attention loses, while it trains as any other."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from mtraining_jax.config import Config
from mtraining_jax.models.transformer import Attention
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.sparsity import Pattern
from mtraining_jax.sparsity.audit import GRADIENT_FIGURES, AuditRows
from mtraining_jax.training import parts
from mtraining_jax.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class StepAudit:
    """What `make_train_step` needs to audit a step.

    Attributes:
        draw: from the state before the step to the rows that are measured, other ones each step.
        attention: from rows to the attention of layers, which takes a `sink`; see
            `attention.auditing.Audit`.
        sinks: shape of the sinks of all layers, [L, Hq, 2].
    """

    draw: Callable[[TrainState], AuditRows]
    attention: Callable[[AuditRows], Attention]
    sinks: tuple[int, int, int]

    def differentiate(self, loss_of: Callable, attention_inputs: Any) -> Callable:
        """The gradient of a loss, and besides what flows into the sinks.

        Args:
            loss_of: (trained, frozen, batch, count, attention, attention_inputs) -> loss, stats.
            attention_inputs: those of the step, one slice for each layer, or None.

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
    """The audit of a run's steps; None if it asks for none, or has dense attention.

    Args:
        config: of the run.
        mesh: axes ('data', 'node', 'device').
        layout: the order of tokens.
        pattern: from `parts.build_pattern`.
    """
    if not config.audit.every_steps or not config.sparsity.settings.sparse:
        return None
    seq_len, count = config.data.seq_len, config.audit.rows

    def draw(state: TrainState) -> AuditRows:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
        # The end of a sequence of documents is that of one of them, or padding.
        return AuditRows.draw(key, seq_len, count, last=not config.data.has_documents)

    attention = functools.partial(parts.build_attention, config, mesh, layout, pattern)
    sinks = (config.model.num_layers, config.model.num_heads, len(GRADIENT_FIGURES))
    return StepAudit(draw, attention, sinks)
