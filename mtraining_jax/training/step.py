"""One compiled optimizer step: gradients over micro-batches, clipping, finite check, AdamW."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtraining_jax.attention.inputs import AttentionInputs, Observer
from mtraining_jax.config import Config
from mtraining_jax.documents import Documents
from mtraining_jax.models.experts.mixture import balance_loss
from mtraining_jax.models.huggingface.checksums import checksum
from mtraining_jax.models.labels import IGNORE_LABEL
from mtraining_jax.models.lora.projection import seeds_from
from mtraining_jax.models.loss import count_labels, linear_cross_entropy
from mtraining_jax.models.transformer import Attention
from mtraining_jax.parallel.compiler import ring_compiler_options
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import DATA_AXIS, DOCUMENTS, OVERRIDES, SEQUENCE_AXES, TOKENS
from mtraining_jax.parallel.ordering import join
from mtraining_jax.parallel.replicas import constrain, per_replica, shard_map_remaining
from mtraining_jax.training.build import build_layout
from mtraining_jax.training.guard.sums import (
    Findings,
    GuardInputs,
    StateSums,
    digest,
    gradient_sums,
    is_held,
)
from mtraining_jax.training.optimizer import (
    Parameters,
    add,
    clip,
    make_schedule,
    update,
    update_from_host,
    zeros_like,
)
from mtraining_jax.training.state import PRNG_IMPL, StateBuilder, TrainState
from mtraining_jax.utils.errors import UserError

Batch = dict[str, Any]  # arrays, `Documents`, and of each option in "overrides"
Metrics = dict[str, Any]

AUXILIARY_LOSS, LOSS_TERMS = "auxiliary_loss", "loss_terms"
_NOT_OF_LAYERS = "audit", "masks", AUXILIARY_LOSS, LOSS_TERMS
# Functions (hidden states, output weight, batch) -> terms of the loss by name: `Callback.loss`.
LossTerms = Sequence[Callable[[Array, Array, Batch], Mapping[str, Array]]]


class StepObserver(Protocol):
    """Observes the attention of all layers in a step; static. The audit is one."""

    def draw(self, key: Array) -> Any:
        """Draws what to observe in a step, a pytree."""
        ...

    def taps(self) -> Any:
        """Returns inputs that do not change the loss, for what the backward pass measures."""
        ...

    def observer(self, drawn: Any, taps: Any) -> Observer:
        """Returns the observers of all layers, with a leading layer axis."""
        ...

    def results(self, layers: dict[str, Any], tap_gradients: Any) -> dict[str, Any]:
        """Returns the statistics of layers, [L, ...] by name, given the cotangent of the taps."""
        ...


def make_train_step(
    config: Config,
    builder: StateBuilder,
    attention: Attention,
    mesh: Mesh,
    attention_inputs: AttentionInputs | None = None,
    observer: StepObserver | None = None,
    loss_terms: LossTerms = (),
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Builds one jitted training step: (state, batch[, guard]) -> (next state, metrics).

    It donates the state. The loss is the mean of -log p over all counted labels of the batch, on
    all micro-batches and devices, or the mean over documents of their means (`loss.weighting`).
    Gradients are summed in fp32 over `optimizer.accumulation_steps` micro-batches. A step with a
    loss or gradient norm that is not finite, or a norm above `optimizer.skip_norm`, is skipped and
    counted: parameters and optimizer state stay unchanged, as they do in a batch without labels, of
    loss 0, unless `loss_terms` have a gradient. An observer measures attention in every step.

    With `GuardInputs`, a step may be held: then all of its state, also its counters, stays as it
    was, and the same step can be taken again.

    The batch is that of `DeviceBatches`, optionally with `overrides`, int32 [B, L] by option, of
    each layer for each sequence, as in `SelectionContext`.

    Metrics stay on the devices until they are read: fp32 `loss`, `grad_norm` (before clipping) and
    `lr` (NaN if the optimizer has its own); `parameter_norms`, that of each parameter's gradient,
    fp32 [], or [L] if in all layers; int32 `step` (from 1), `labels` (counted), `real_tokens`,
    `skipped` (so far) and `skipped_in_row`; `layers`, statistics by name, fp32 [L] each, mean over
    the batch; with experts `auxiliary_loss`, the mean over sequences, which is not part of `loss`;
    with `loss_terms` also their means; with `overrides` `density_by_group`, fp32 [M, L];
    with a `StepAudit` `audit`, figures by name, fp32 [L, Hq] each, and optionally `masks`, an index
    with a leading layer axis; with `guard` `guard`, its `Findings`.
    """
    schedule, layout = make_schedule(config.optimizer, config.run.steps), build_layout(config)
    gradients_of = make_gradients(
        config, builder, attention, attention_inputs, observer, loss_terms
    )

    def train_step(
        state: TrainState, batch: Batch, guard: GuardInputs | None = None
    ) -> tuple[TrainState, Metrics]:
        trained, frozen = builder.split(state.model)
        drawn = None if observer is None else observer.draw(key_of_step(state))
        if config.lora.dropout and config.lora.rank:
            batch = batch | {"dropout": draw_dropout(state, batch["tokens"].shape, mesh, layout)}
        loss, gradients, by_group = gradients_of(trained, frozen, batch, drawn)
        several = config.parallel.replicas > 1
        layers = jax.tree.map(mean_over_parts, by_group) if several else dict(by_group)
        others = {x: layers.pop(x) for x in _NOT_OF_LAYERS if x in layers}
        held = jnp.asarray(False)
        with jax.named_scope("optimizer"):
            scale, norm, norms = clip(gradients, config.optimizer.clip_norm)
            if guard is not None:
                state_sums, sums = StateSums(builder), gradient_sums(gradients)
                damaged = jnp.any(state_sums(state) != guard.state_sums)
                mixed = digest([*sums.values(), checksum(loss)])
                held = is_held(guard, damaged, mixed, loss, norm)
            usable = jnp.isfinite(loss) & jnp.isfinite(norm)
            if config.optimizer.skip_norm:
                usable &= norm <= config.optimizer.skip_norm
            labels = count_labels(batch["labels"])
            # AdamW would also move without a gradient.
            learns = norm > 0 if loss_terms else labels > 0
            applied = usable & learns & ~held
            lr = jnp.float32(jnp.nan) if builder.own_rate else schedule(state.step)
            rate = jnp.float32(-1) if builder.own_rate else lr
            take = update_from_host if config.optimizer.offload else update
            updated, opt_state = take(
                builder.optimizer, gradients, state.opt_state, trained, rate, applied, scale
            )
            after = dataclasses.replace(
                state,
                step=state.step + jnp.where(held, 0, 1),
                parameters=state.parameters | updated,
                opt_state=opt_state,
                skipped=state.skipped + jnp.where(usable | held, 0, 1),
                skipped_in_row=jnp.where(
                    held, state.skipped_in_row, jnp.where(usable, 0, state.skipped_in_row + 1)
                ),
            )
            if guard is not None:
                after_sums = state_sums(after)
                split = jnp.any(state_sums.differ(after_sums))
                others["guard"] = Findings(held, damaged, split, after_sums, sums, mixed)
        metrics = {
            "step": after.step,
            "loss": loss,
            "grad_norm": norm,
            "parameter_norms": norms,
            "lr": lr,
            "labels": labels,
            "real_tokens": count_real_tokens(batch),
            "skipped": after.skipped,
            "skipped_in_row": after.skipped_in_row,
            "layers": layers,
            **others,
        }
        if "overrides" in batch:
            density = by_group["density"]
            metrics["density_by_group"] = density.reshape(config.parallel.replicas, -1)
        return after, metrics

    everywhere = NamedSharding(mesh, P())
    return jax.jit(
        train_step,
        donate_argnums=0,
        out_shardings=(builder.shardings(), everywhere),
        compiler_options=ring_compiler_options(
            mesh.devices.flat[0].platform, offloads=config.model.remat == "full_offload"
        ),
    )


def count_real_tokens(batch: Batch) -> Array:
    """The number of tokens of a batch without padding, an int32 scalar."""
    if "documents" not in batch:
        return jnp.asarray(batch["tokens"].size, jnp.int32)
    documents: Documents = batch["documents"]
    begins = documents.first == jnp.arange(documents.first.shape[1])  # once per document
    return jnp.sum(jnp.where(begins, documents.tokens, 0), dtype=jnp.int32)


def draw_dropout(state: TrainState, shape: tuple[int, ...], mesh: Mesh, layout: Layout) -> Array:
    """Draws the dropout seeds of all tokens, fp32 [B, S], given the state before the step.

    A token has the same seed in all layouts. They are returned in layout order.
    """
    bits = jax.random.bits(jax.random.fold_in(key_of_step(state), 1), shape, jnp.uint32)
    blocks = bits.reshape(shape[0], layout.num_blocks, layout.block_size)[:, layout.block_order()]
    return constrain(seeds_from(blocks.reshape(shape)), mesh, TOKENS)


def key_of_step(state: TrainState) -> Array:
    """Returns the random key of a step, given the state before it."""
    return jax.random.fold_in(jax.random.wrap_key_data(state.rng, impl=PRNG_IMPL), state.step)


def make_gradients(
    config: Config,
    builder: StateBuilder,
    attention: Attention,
    attention_inputs: AttentionInputs | None = None,
    observer: StepObserver | None = None,
    loss_terms: LossTerms = (),
):
    """Builds a function (trained, frozen, batch, drawn) -> loss, gradients, layer stats.

    `drawn` is that of the observer. Stats are [L, ...], or [M, L, ...] with several replicas.
    """
    model, mesh, parts = config.model, builder.mesh, config.optimizer.accumulation_steps
    run_inputs, layout = attention_inputs or AttentionInputs(), build_layout(config)

    def loss_of(trained: Parameters, taps: Any, frozen, batch, counts, drawn):
        count, sequences = counts
        layer_observers = None if observer is None else observer.observer(drawn, taps)
        inputs = dataclasses.replace(run_inputs, observer=layer_observers)
        hidden, lm_head, layers = run_layers(
            builder, layout, attention, inputs, {**trained, **frozen}, batch
        )
        total = linear_cross_entropy(
            hidden,
            lm_head,
            batch["labels"],
            chunk_size=config.loss.chunk_size,
            mesh=mesh,
            weight_spec=builder.lm_head_spec,
            label_weights_BS=batch.get("weights"),
            trains_weight=builder.lm_head_name in builder.trainable,
        )
        loss = objective = total / jnp.where(count > 0, count, 1)
        if (used := layers.pop("experts", None)) is not None:
            auxiliary, load = balance_loss(used)
            objective += model.router_aux_loss_coef * len(hidden) / sequences * auxiliary
            layers |= {AUXILIARY_LOSS: auxiliary, "expert_load": load}
        if loss_terms:
            found: dict[str, Array] = {}
            for terms in loss_terms:
                more = terms(hidden, lm_head, batch)
                if twice := sorted(found.keys() & more.keys()):
                    raise UserError(
                        f"two callbacks add a term {twice[0]!r} to the loss: give each its own name"
                    )
                found |= more
            objective += len(hidden) / sequences * sum(found.values())
            layers[LOSS_TERMS] = found
        return objective, (loss, layers)

    value_and_grad = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)

    def differentiate(trained: Parameters, *args: Any):
        taps = None if observer is None else observer.taps()
        (_, (loss, layers)), (gradients, tap_gradients) = value_and_grad(trained, taps, *args)
        if observer is not None:
            layers = observer.results(layers, tap_gradients)
        return loss, gradients, layers

    def replica_gradients(trained: Parameters, frozen: Parameters, batch: Batch, *rest: Any):
        if parts == 1:
            return differentiate(trained, frozen, batch, *rest)

        def add_micro_batch(sums: tuple[Array, Parameters], micro: Batch):
            loss, gradients, layers = differentiate(trained, frozen, micro, *rest)
            return (sums[0] + loss, add(sums[1], gradients)), layers

        zeros = jnp.zeros((), jnp.float32), zeros_like(trained)
        (loss, gradients), layers = lax.scan(
            add_micro_batch, zeros, micro_batches(batch, parts, mesh)
        )
        return loss, gradients, jax.tree.map(mean_over_parts, layers)

    def summed_over_replicas(*args: Any):
        loss, gradients, layers = replica_gradients(*args)
        # All gradients first: an early reduction would make replicas wait for each other.
        loss, gradients = join((loss, gradients))
        loss, gradients = lax.psum((loss, gradients), DATA_AXIS)
        return loss, gradients, jax.tree.map(lambda x: x[None], layers)

    batch_gradients = replica_gradients
    if config.parallel.replicas > 1:
        in_specs, out_specs = (P(), P(), P(DATA_AXIS), P(), P()), (P(), P(), P(DATA_AXIS))
        batch_gradients = per_replica(summed_over_replicas, mesh, in_specs, out_specs)

    def gradients_of(trained: Parameters, frozen: Parameters, batch: Batch, drawn: Any):
        labels, weights = batch["labels"], batch.get("weights")
        # The weights of a document sum to 1; batches from Python may have others.
        counted = labels != IGNORE_LABEL
        count = count_labels(labels) if weights is None else jnp.sum(jnp.where(counted, weights, 0))
        return batch_gradients(trained, frozen, batch, (count, len(labels)), drawn)

    return gradients_of


def run_layers(
    builder: StateBuilder,
    layout: Layout,
    attention: Attention,
    inputs: AttentionInputs,
    parameters: Parameters,
    batch: Batch,
) -> tuple[Array, Array, dict[str, Any]]:
    """Returns hidden states of a batch, the LM head's weight, and statistics of the layers."""
    inputs = dataclasses.replace(
        inputs,
        documents=batch.get("documents"),
        overrides=jax.tree.map(jnp.transpose, batch.get("overrides")),
    )
    positions, lengths = positions_and_lengths(batch, layout, builder.mesh)
    model = nnx.merge(builder.graphdef, builder.unflatten(parameters))
    hidden, layers = model(
        batch["tokens"],
        positions,
        attention,
        attention_inputs=inputs,
        mesh=builder.mesh,
        fsdp=builder.fsdp,
        length=lengths,
        dropout_seeds=batch.get("dropout"),
    )
    return hidden, model.lm_head_weight(), layers


def positions_and_lengths(batch: Batch, layout: Layout, mesh: Mesh) -> tuple[Array, Array | None]:
    """Returns the position of each token in its document, and the document's real tokens.

    int32 [B, S] in layout order, both 0 in blocks without a document. The lengths are None for
    whole sequences.
    """
    documents: Documents | None = batch.get("documents")

    def on_shard(tokens: Array, packed: Documents | None) -> tuple[Array, Array | None]:
        blocks = layout.block_ids(lax.axis_index(SEQUENCE_AXES))
        if packed is not None:
            return packed.positions(blocks), packed.lengths(blocks)
        whole = Documents.whole(layout.num_blocks, layout.block_size)
        return jnp.broadcast_to(whole.positions(blocks), tokens.shape), None

    specs = (TOKENS, DOCUMENTS), (TOKENS, TOKENS)
    return shard_map_remaining(on_shard, mesh, *specs)(batch["tokens"], documents)


def micro_batches(batch: Batch, parts: int, mesh: Mesh) -> Batch:
    """Splits the batch of a replica, [B, ...], into micro-batches [parts, B / parts, ...]."""

    def cut(x: Array, spec: P) -> Array:
        return constrain(x.reshape(parts, -1, *x.shape[1:]), mesh, P(None, *spec))

    specs = {"documents": DOCUMENTS, "overrides": OVERRIDES}
    return {
        name: jax.tree.map(functools.partial(cut, spec=specs.get(name, TOKENS)), x)
        for name, x in batch.items()
    }


def mean_over_parts(x: Array) -> Array:
    """Mean over micro-batches or replicas; integers (masks) are taken from the first.

    A part without a value does not count: all of its audited queries may be padding.
    """
    return jnp.nanmean(x, axis=0) if jnp.issubdtype(x.dtype, jnp.floating) else x[0]
