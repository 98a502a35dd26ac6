"""One optimizer step, compiled: gradients over micro-batches, clip, guard, AdamW."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtraining_jax.config import Config
from mtraining_jax.models.sharding import lm_head_spec
from mtraining_jax.models.transformer import Attention
from mtraining_jax.parallel.compiler import ring_compiler_options
from mtraining_jax.parallel.groups import constrain, in_groups
from mtraining_jax.parallel.mesh import DATA_AXIS, DOCUMENTS, SHARES, TOKENS
from mtraining_jax.parallel.ordering import all_made
from mtraining_jax.sparsity.audit import AuditRows
from mtraining_jax.training.audit import StepAudit
from mtraining_jax.training.documents import attention_within
from mtraining_jax.training.loss import count_labels, linear_cross_entropy
from mtraining_jax.training.optimizer import Parameters, clip, make_schedule
from mtraining_jax.training.shares import with_shares
from mtraining_jax.training.state import StateBuilder, TrainState

Batch = dict[str, Array]
Metrics = dict[str, Any]


def make_train_step(
    config: Config,
    builder: StateBuilder,
    attention: Attention,
    mesh: Mesh,
    attention_inputs: Any = None,
    audit: StepAudit | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Compiles, at its first call, one step of training.

    The loss is the mean of -log p over all counted labels of the batch, whichever micro-batch or
    device they are on, or the mean over its documents of their means (`loss.weighting`). Gradients
    are summed in fp32 over `optimizer.accumulation_steps` micro-batches; within one, those of the
    layers' matrices have the compute dtype. A step whose loss or gradient norm is not finite
    changes no parameter and no optimizer state, and is counted.

    Args:
        config: of the run.
        builder: of its states.
        attention: what the model's layers attend with; see `Transformer`.
        mesh: axes ('data', 'node', 'device').
        attention_inputs: pytree with a leading axis of layers, one slice for each; see
            `Transformer`.
        audit: what the step measures besides, with its attention in place of `attention`; None
            measures nothing.

    Returns:
        A function of the state, whose buffers it takes over, and of a batch: int32 [B, S] `tokens`,
        `labels` and `positions` in layout order, and optionally `documents` int32 [B, NB, 3] as in
        `Documents`: attention then stays within each, and positions are those within it;
        `document_lengths` int32 [B, S], if the model's rotary positions read the length of a
        sequence; fp32 `weights` [B, S] of labels, which the mean is taken by; and int32 `shares`
        [B, L], which the layers keep of each sequence's mass, as in `Shards`. It gives the next
        state and metrics, which stay on the devices until they are read: fp32 scalars `loss`,
        `grad_norm` (before the clip) and `lr`; int32 scalars `step` (its number, from 1), `labels`
        (counted), `skipped` (so far) and `skipped_in_row`; and `layers`, what the attention reports
        by name, fp32 [L] each, mean over the batch; and with `shares` also `density_by_group`,
        fp32 [M, L]. An audited step also gives `audit`, figures by name, fp32 [L, Hq] each, mean
        over micro-batches and groups, and if asked `masks`, an index with a leading axis of layers.
    """
    schedule = make_schedule(config.optimizer, config.run.steps)
    gradients_of = make_gradients(config, builder, attention, mesh, attention_inputs, audit)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        trained, frozen = builder.split(state.parameters)
        labels = count_labels(batch["labels"])
        # The weights of a document add up to 1.
        count = jnp.sum(batch["weights"]) if "weights" in batch else labels
        rows = () if audit is None else (audit.draw(state),)
        loss, gradients, by_group = gradients_of(trained, frozen, batch, count, *rows)
        layers = by_group
        if config.parallel.data > 1:
            layers = jax.tree.map(_over_parts, by_group)
        of_audit = {name: layers[name] for name in ("audit", "masks") if name in layers}
        layers = {name: x for name, x in layers.items() if name not in of_audit}
        gradients, norm = clip(gradients, config.optimizer.clip_norm)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)

        updates, opt_state = builder.optimizer.update(gradients, state.opt_state, trained)
        lr = schedule(state.step)
        updated = jax.tree.map(lambda parameter, u: parameter - lr * u, trained, updates)

        def guarded(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda x, y: jnp.where(finite, x, y), new, old)

        after = TrainState(
            step=state.step + 1,
            parameters={**frozen, **guarded(updated, trained)},
            opt_state=guarded(opt_state, state.opt_state),
            skipped=state.skipped + jnp.where(finite, 0, 1),
            skipped_in_row=jnp.where(finite, 0, state.skipped_in_row + 1),
            rng=state.rng,
        )
        metrics = {
            "step": after.step,
            "loss": loss,
            "grad_norm": norm,
            "lr": lr,
            "labels": labels,
            "skipped": after.skipped,
            "skipped_in_row": after.skipped_in_row,
            "layers": layers,
            **of_audit,
        }
        if "shares" in batch:
            density = by_group["density"]
            metrics["density_by_group"] = density.reshape(config.parallel.data, -1)
        return after, metrics

    everywhere = NamedSharding(mesh, P())
    return jax.jit(
        train_step,
        donate_argnums=0,
        out_shardings=(builder.shardings(), everywhere),
        compiler_options=ring_compiler_options(mesh.devices.flat[0].platform),
    )


def make_gradients(
    config: Config,
    builder: StateBuilder,
    attention: Attention,
    mesh: Mesh,
    attention_inputs: Any = None,
    audit: StepAudit | None = None,
):
    """(trained, frozen, batch, count[, rows]) -> loss, gradients, stats of layers.

    `count` is what sums are divided by, over all micro-batches; `rows` are those of an audit. Stats
    are [L, ...], and of several groups of devices [M, L, ...].
    """
    fsdp = config.parallel.fsdp

    def loss_of(
        trained: Parameters, frozen: Parameters, batch: Batch, count: Array,
        attention: Attention = attention, attention_inputs: Any = attention_inputs,
    ):
        model = nnx.merge(builder.graphdef, builder.unflatten({**trained, **frozen}))
        attend, inputs = with_shares(attention_within(attention, batch), attention_inputs, batch)
        hidden, layers = model(
            batch["tokens"],
            batch["positions"],
            attend,
            attention_inputs=inputs,
            mesh=mesh,
            fsdp=fsdp,
            length=batch.get("document_lengths"),
        )
        weight = model.lm_head_weight()
        total = linear_cross_entropy(
            hidden,
            weight,
            batch["labels"],
            chunk_size=config.loss.chunk_size,
            mesh=mesh,
            weight_spec=lm_head_spec(builder.spec, mesh, fsdp),
            label_weights_BS=batch.get("weights"),
        )
        return total / jnp.maximum(count, 1), layers

    differentiate = jax.value_and_grad(loss_of, has_aux=True)
    if audit is not None:
        differentiate = audit.differentiate(loss_of, attention_inputs)
    parts, groups = config.optimizer.accumulation_steps, config.parallel.data

    def of_group(
        trained: Parameters, frozen: Parameters, batch: Batch, count: Array, *rows: AuditRows
    ):
        if parts == 1:
            (loss, layers), gradients = differentiate(trained, frozen, batch, count, *rows)
            return loss, gradients, layers

        def add(sums: tuple[Array, Parameters], micro: Batch):
            (loss, layers), gradients = differentiate(trained, frozen, micro, count, *rows)
            return jax.tree.map(jnp.add, sums, (loss, gradients)), layers

        zeros = jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, trained)
        (loss, gradients), layers = lax.scan(add, zeros, micro_batches(batch, parts, mesh))
        return loss, gradients, jax.tree.map(_over_parts, layers)

    def meeting(
        trained: Parameters, frozen: Parameters, batch: Batch, count: Array, *rows: AuditRows
    ):
        loss, gradients, layers = of_group(trained, frozen, batch, count, *rows)
        # No sum starts before all are made, or the first would have groups wait for each other.
        loss, gradients = all_made((loss, gradients))
        loss, gradients = lax.psum((loss, gradients), DATA_AXIS)
        return loss, gradients, jax.tree.map(lambda x: x[None], layers)

    if groups == 1:
        return of_group

    def gradients_of(
        trained: Parameters, frozen: Parameters, batch: Batch, count: Array, *rows: AuditRows
    ):
        of_batch = {name: P(DATA_AXIS) for name in batch}
        in_specs = (P(), P(), of_batch, P(), *(P() for _ in rows))
        run = in_groups(meeting, mesh, in_specs, (P(), P(), P(DATA_AXIS)))
        return run(trained, frozen, batch, count, *rows)

    return gradients_of


def _over_parts(x: Array) -> Array:
    """The mean over micro-batches or groups; of a mask, which has integers, that of the first."""
    return jnp.mean(x, axis=0) if jnp.issubdtype(x.dtype, jnp.floating) else x[0]


def micro_batches(batch: Batch, parts: int, mesh: Mesh) -> Batch:
    """Cuts the batch of a group, [B, ...], into micro-batches [parts, B / parts, ...]."""

    def cut(name: str, x: Array) -> Array:
        spec = {"documents": DOCUMENTS, "shares": SHARES}.get(name, TOKENS)
        return constrain(x.reshape(parts, -1, *x.shape[1:]), mesh, P(None, *spec))

    return {name: cut(name, x) for name, x in batch.items()}
