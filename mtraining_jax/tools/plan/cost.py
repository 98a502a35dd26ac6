"""FLOP of a training step, and its predicted time from measured rates."""

import dataclasses
from collections import Counter

from mtraining_jax.config import Config
from mtraining_jax.models.lora.adapters import FACTORS
from mtraining_jax.models.spec import layer_windows
from mtraining_jax.reporting.flops import StepFlops, adapter_products, layer_products, step_flops
from mtraining_jax.tools.plan import pattern_costs
from mtraining_jax.tools.plan.documents import Pairs, planned_pairs
from mtraining_jax.tools.plan.hardware import Gpu
from mtraining_jax.tools.plan.kernel_times import (
    FP8_SPEEDUP,
    KERNEL_RATES,
    SCORES_PER_SECOND,
    kernel_seconds,
    matmul_rate,
)
from mtraining_jax.tools.plan.memory import (
    Memory,
    attention_parts,
    dtype_bytes,
    kept_mlp_products,
    kept_mlp_tokens,
    offloaded,
)

# Reads and writes of the inputs and outputs of adapters, counted in their products: 4.0 for
# Qwen2.5-3B, 5.0 for Qwen3-8B. The same count explained 0.84 s of a step of 5.71 s when gate and up
# products had 8 passes more (H200, Qwen2.5-3B, rank 32, 131072 tokens).
_ADAPTER_PASSES = 4.5
# Reads and writes of q, output, their gradients and dq where heads are computed in parts; by count.
_HEAD_PASSES = 10


@dataclasses.dataclass(frozen=True)
class Flops(StepFlops):
    """FLOP of one step on all devices, with rematerialization."""

    recomputed: float  # rematerialized matrix products; not included in `matrices`
    attention_recomputed: float  # not included in `attention_executed`
    density: float  # computed pairs over causal pairs (within documents)

    @property
    def executed(self) -> float:
        return super().executed + self.recomputed + self.attention_recomputed


def count_flops(config: Config, pairs: Pairs | None = None) -> Flops:
    """Counts the FLOP of a step from the shapes of its products; a multiply-add is two FLOP."""
    pairs = planned_pairs(config) if pairs is None else pairs
    model, density = config.model, pairs.density
    step = step_flops(config, density=density, executed=density, causal=pairs.causal)
    # The backward pass needs x A of every adapter x A B.
    always = adapter_products(config, FACTORS[:1]).total()
    others = Counter(layer_products(config)) + adapter_products(config, FACTORS[1:])
    gate_and_up = sum(others[f"mlp.{x}_proj.weight"] for x in ("gate", "up"))
    again = 1 - kept_mlp_tokens(config) / config.local_tokens
    # It does not need the output of the last of the three products of the MLP.
    recomputed = always + {"none": -always, "mlp": gate_and_up * again}.get(
        model.remat, others.total() - others["mlp.down_proj.weight"]
    )
    return Flops(
        **dataclasses.asdict(step),
        recomputed=2.0 * config.tokens_per_step * model.num_layers * recomputed,
        # 4 of the 14 FLOP per pair and head dimension are forward.
        attention_recomputed=step.attention_executed * 4 / 14 if model.remat == "full" else 0.0,
        density=density,
    )


def seconds(config: Config, gpu: Gpu, memory: Memory, flops: Flops) -> dict[str, float]:
    """Predicts the seconds of each part of a step, assuming that ring communication is hidden."""
    model, devices, settings = config.model, config.devices, config.sparsity.pattern
    micro_batches, width = config.optimizer.accumulation_steps, model.head_dim
    forward = (flops.attention_executed * 4 / 14 + flops.attention_recomputed) / gpu.forward_share
    backward = flops.attention_executed * 10 / 14 / gpu.backward_share
    matmul = matmul_rate(model.hidden_size, config.ranks) * gpu.matmul_share
    result = {
        "attention": kernel_seconds(width, flops.density, forward, backward) / devices,
        "matrix products": (flops.matrices + flops.recomputed) / (devices * matmul),
    }
    if settings.sparse:
        passes = 2 if model.remat == "full" else 1
        layers = layer_windows(model).count(None)
        indices = passes * layers * model.num_heads * config.tokens_per_step
        if pattern_costs.selects_an_index(settings):
            # Assumes that scores are computed at the rate of a dense forward pass. Scores with a
            # softmax (one product each) take as long as their exponentials if that is longer.
            pairs = passes * layers / model.num_layers * flops.attention_dense / (14 * width)
            dense = kernel_seconds(width, 1.0, 4 * width * pairs, 0.0)
            softmax = pattern_costs.softmax_share(settings)
            products = softmax / 2 * dense
            scoring = pattern_costs.scoring_share(settings) * dense - products
            coded = pattern_costs.scores_fp8_keys(settings) and gpu.backend == "mosaic_gpu"
            speedup = FP8_SPEEDUP if coded else 1.0
            exponentials = softmax * pairs / (SCORES_PER_SECOND * gpu.scores_share)
            scoring = scoring / gpu.forward_share
            scoring += max(products / gpu.forward_share, exponentials) / speedup
            selection = indices * gpu.index_seconds + scoring
            result["index selection"] = selection / devices
        else:
            result["building work lists"] = indices * gpu.lists_seconds / devices
    windows = model.num_layers - layer_windows(model).count(None)
    if windows and config.ranks > 1:
        # Queries, keys, values and outputs change their layout, and so do their gradients. With
        # rematerialization, the first do so twice.
        heads = 2 * (model.num_heads + model.num_kv_heads) * (2 if model.remat == "none" else 3)
        moved = heads * width * config.local_tokens * dtype_bytes(config)
        moved *= windows * micro_batches * (config.ranks - 1) / config.ranks
        result["exchange for windows"] = moved / gpu.link_bytes
    if kept := kept_mlp_products(config):
        # Each is copied into the stack of all layers and out of it: two reads and two writes.
        result["MLP products kept"] = 4 * kept * model.num_layers * micro_batches / gpu.copy_bytes
    if attention_parts(config) > 1:
        wide = config.local_tokens * model.num_heads * width * dtype_bytes(config)
        moved = _HEAD_PASSES * wide * model.num_layers * micro_batches
        result["copies of heads"] = moved / gpu.copy_bytes
    if memory.host:
        activations = offloaded(config)
        state = memory.host - activations
        if config.optimizer.offload == "all":
            # Parameters and gradients are copied 7 times and both moments 4 times, and gradients
            # with their sums, a fifth part, and parameters 6 times more in a further micro-batch.
            part = state / (4 if micro_batches == 1 else 5)
            state = part * (7 + 4 + 6 * (micro_batches - 1)) / 2
        moved = activations * micro_batches + state
        result["offload copies"] = 2 * moved / gpu.offload_bytes
    # The update reads parameters, gradients and moments and writes all except the gradients.
    # Frozen parameters take no part in it.
    touched = 2 * (memory.parameters + memory.optimizer) + memory.gradients
    result["optimizer"] = touched / gpu.copy_bytes
    if adapters := config.lora.spec:
        # Products of so small a rank take as long as reading and writing their other side.
        sides = adapter_products(config).total() / adapters.rank * model.num_layers
        moved = _ADAPTER_PASSES * sides * dtype_bytes(config) * config.tokens_per_step / devices
        result["adapters"] = moved / gpu.copy_bytes
    if config.parallel.fsdp:
        # All-gather of parameters in forward and backward, in the compute dtype, and reduce-scatter
        # of gradients in fp32. Frozen parameters are stored in the compute dtype.
        shard = memory.parameters / 4 * dtype_bytes(config)
        moved = 2 * (shard + memory.frozen) + memory.parameters
        moved *= micro_batches * (config.ranks - 1)
        result["gathering parameters"] = moved / gpu.link_bytes
    return result


def rates_missing(config: Config, gpu: Gpu) -> str | None:
    """Why the step time cannot be predicted; None if it can."""
    model, backend = config.model, config.parallel.backend
    if config.parallel.cpu_devices is not None:
        return "there are no measured rates for CPUs"
    if model.dtype != "bfloat16":
        return f"rates are known for bfloat16 only, not for model.dtype = {model.dtype}"
    known = "attention rates are known for"
    if model.head_dim not in KERNEL_RATES:
        widths = " and ".join(map(str, KERNEL_RATES))
        return f"{known} head dimensions {widths}, not for model.head_dim = {model.head_dim}"
    if backend not in ("auto", gpu.backend):
        return f'{known} the backend {gpu.backend}, not for parallel.backend = "{backend}"'
    return None
