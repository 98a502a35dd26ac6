"""What a training step computes, and how long that should take at measured rates."""

import dataclasses

from mtraining_jax.config import Config
from mtraining_jax.latency import (
    KERNEL_RATES,
    SCORES_PER_SECOND,
    kernel_seconds,
    matmul_rate,
)
from mtraining_jax.models.families import family_of
from mtraining_jax.models.spec import ModelSpec
from mtraining_jax.planning.documents import Pairs, planned_pairs
from mtraining_jax.planning.hardware import Gpu
from mtraining_jax.planning.memory import (
    Memory,
    kept_mlp_products,
    kept_mlp_tokens,
)
from mtraining_jax.reporting.flops import step_flops


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOP of one step on all devices together, forward and backward.

    Attributes:
        layers: matrix products of all layers, without attention.
        head: the output layer.
        recomputed: products of the layers that the backward pass does again; not in `layers`.
        attention: of the pairs that are computed.
        attention_recomputed: the same that the backward pass does again; not in `attention`.
        attention_dense: of all causal pairs, or all within documents, for comparison.
        model: what MFU counts; see `reporting.flops`.
        density: computed over causal pairs, those within documents where there are any.
    """

    layers: float
    head: float
    recomputed: float
    attention: float
    attention_recomputed: float
    attention_dense: float
    model: float
    density: float


def count_flops(config: Config, pairs: Pairs | None = None) -> Flops:
    """The FLOP of a step, by the shapes of its products; a multiply and an add are two.

    Args:
        config: of the run.
        pairs: of attention; None takes `planned_pairs`.
    """
    pairs = planned_pairs(config) if pairs is None else pairs
    model, tokens = config.model, config.tokens_per_step
    spec = ModelSpec.from_config(model)
    family = family_of(spec.family)
    products = family.layer_products(spec)
    forward = 2.0 * tokens * sum(products.values()) * model.num_layers
    # One of the three products of the MLP. The backward pass does not need what the last gives.
    third = 2.0 * tokens * products["mlp.down_proj.weight"] * model.num_layers
    again = 1 - kept_mlp_tokens(config) / config.local_tokens
    recomputed = {"none": 0.0, "mlp": 2 * third * again}.get(model.remat, forward - third)
    share = pairs.density
    step = step_flops(config, density=share, executed=share, causal=pairs.causal)
    dense = step.attention_dense
    return Flops(
        layers=3 * forward,
        head=6.0 * tokens * family.head_products(spec),
        recomputed=recomputed,
        attention=share * dense,
        # 4 of its 14 FLOP a pair and width are forward.
        attention_recomputed=share * dense * 4 / 14 if model.remat == "full" else 0.0,
        attention_dense=dense,
        model=step.model,
        density=share,
    )


def seconds(config: Config, gpu: Gpu, memory: Memory, flops: Flops) -> dict[str, float]:
    """The time of a step by part; communication in the ring is taken to be hidden.

    Args:
        config: of the run.
        gpu: of which each device is one; `rates_missing` must find none of its rates missing.
        memory: of one device.
        flops: from `count_flops`.

    Returns:
        Seconds by what they go to.
    """
    model, parallel, width = config.model, config.parallel, config.model.head_dim
    devices = config.devices
    dense = not config.sparsity.settings.sparse
    forward = flops.attention * 4 / 14 + flops.attention_recomputed
    attention = kernel_seconds(
        width, flops.density, forward / gpu.forward_share,
        flops.attention * 10 / 14 / gpu.backward_share,
    )
    matmul = matmul_rate(model.hidden_size, config.ranks) * gpu.matmul_share
    products = flops.layers + flops.head + flops.recomputed
    result = {
        "attention": attention / devices,
        "matrix products": products / (devices * matmul),
    }
    if not dense:
        passes = 2 if model.remat == "full" else 1
        indices = passes * model.num_layers * config.data.batch_size * model.num_heads
        indices *= config.data.seq_len
        # Scores are taken to be computed at the rate of a dense forward pass; those that go through
        # a softmax, one product each, at that of their exponentials where these take longer.
        settings, pairs = config.sparsity.settings, passes * flops.attention_dense / (14 * width)
        share = settings.softmax_share()
        one, others = (
            kernel_seconds(width, 1.0, part * 4 * width * pairs, 0.0)
            for part in (share / 2, settings.scoring_share() - share / 2)
        )
        scoring = others + max(one, share * pairs / SCORES_PER_SECOND)
        choosing = indices * gpu.index_seconds + scoring / gpu.forward_share
        if settings.takes_choosing():
            result["choosing indices"] = choosing / devices
        else:
            result["building work lists"] = indices * gpu.lists_seconds / devices
    if kept := kept_mlp_products(config):
        kept *= model.num_layers * config.optimizer.accumulation_steps
        # Each is copied into the stack of all layers, and out of it: two reads and two writes.
        result["MLP products kept"] = 4 * kept / gpu.copy_bytes
    # The update reads parameters, gradients and moments and writes all but the gradients.
    touched = 2 * (memory.parameters + memory.optimizer) + memory.gradients
    result["optimizer"] = touched / gpu.copy_bytes
    if parallel.fsdp:
        # Parameters come in forward and backward, gradients leave; all in the compute dtype.
        size = 2 if model.dtype == "bfloat16" else 4
        share = memory.parameters / 4 * size
        moved = 3 * config.optimizer.accumulation_steps * share * (config.ranks - 1)
        result["gathering parameters"] = moved / gpu.link_bytes
    return result


def rates_missing(config: Config, gpu: Gpu) -> str | None:
    """Why the time of a step cannot be estimated, or None if it can."""
    model = config.model
    if config.parallel.cpu_devices is not None:
        return "no rates of this CPU are known"
    if model.dtype != "bfloat16":
        return f"rates are known for bfloat16, and model.dtype = {model.dtype}"
    if model.head_dim not in KERNEL_RATES:
        known = " and ".join(str(width) for width in KERNEL_RATES)
        return f"rates of attention are known for heads of {known}, and model.head_dim = " + str(
            model.head_dim
        )
    if config.parallel.backend not in ("auto", gpu.backend):
        return (
            f"rates of attention are known for the backend {gpu.backend}, and parallel.backend = "
            f'"{config.parallel.backend}"'
        )
    return None
