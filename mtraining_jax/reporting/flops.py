"""Floating point operations (FLOP) of a training step, and hardware peak rates for MFU.

- *Model FLOP*: required by the mathematics. Each query-key pair takes 4 D forward (two products)
  and 8 D backward (four) per head; a matrix parameter 2 and 4 per token, and 2 and 2 if it is
  frozen. MFU is their rate over the hardware peak. The output layer counts, the token embedding
  and rematerialization do not. Of experts, those that compute a token count.
- *Executed FLOP*: done by the kernels. Backward recomputes the logits, so 10 D; entire tiles count.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from mtraining_jax.config import Config
from mtraining_jax.models.families.family import family_of
from mtraining_jax.models.lora.adapters import FACTORS
from mtraining_jax.models.parameters import LAYERS
from mtraining_jax.models.sharding import lm_head_name
from mtraining_jax.models.spec import ModelSpec, layer_windows
from mtraining_jax.selection.metrics import causal_pairs

# Dense bf16 FLOP/s from NVIDIA's data sheets, by JAX device kind. Variants that are
# not listed differ.
PEAK_BF16_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA H20": 148e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
}


@dataclasses.dataclass(frozen=True)
class StepFlops:
    """FLOP of one optimizer step, forward and backward, on all devices."""

    matrices: float  # products with parameters
    attention_executed: float  # in entire tiles, five products backward
    attention_dense: float  # the same for all causal pairs (within documents)
    attention_model: float  # over computed pairs only, four products backward

    @property
    def executed(self) -> float:
        return self.matrices + self.attention_executed

    @property
    def dense_equivalent(self) -> float:
        return self.matrices + self.attention_dense

    @property
    def model(self) -> float:
        """Model FLOP, as in MFU."""
        return self.matrices + self.attention_model


def step_flops(
    config: Config, *, density: float, executed: float, causal: float = 1.0
) -> StepFlops:
    """Counts the FLOP of one step.

    `density` and `executed` are computed pairs and pairs in executed tiles over causal pairs;
    `causal` are causal pairs over S (S + 1) / 2, less than 1 with documents.
    """
    model, data = config.model, config.data
    heads = causal * data.batch_size * model.num_layers * model.num_heads
    product = 2.0 * heads * model.head_dim * causal_pairs(data.seq_len)
    return StepFlops(
        matrices=matrix_flops(config) * config.tokens_per_step,
        attention_executed=7 * product * executed,
        attention_dense=7 * product,
        attention_model=6 * product * density,
    )


def audit_flops(config: Config) -> float:
    """FLOP on all devices of an audit, enabled or not: rows of dense attention, seven products.

    Layers with a window are not audited.
    """
    model, data = config.model, config.data
    heads = data.batch_size * layer_windows(model).count(None) * model.num_heads
    return 14.0 * heads * config.audit.num_queries * data.seq_len * model.head_dim


def layer_products(config: Config) -> dict[str, int]:
    """Multiplications per token with each matrix of a layer, by name."""
    spec = ModelSpec.from_config(config.model)
    return family_of(spec.family).layer_products(spec)


def idle_parameters(config: Config) -> int:
    """Number of parameters of the experts that do not compute a token; 0 without experts."""
    model = config.model
    if not model.num_experts:
        return 0
    layer = ModelSpec.from_config(model).layer.items()
    router = "mlp.gate."
    sizes = (x.size for name, x in layer if "experts" in x.axes and not name.startswith(router))
    idle = model.num_experts - model.num_experts_per_tok
    return idle * model.num_layers * sum(sizes) // model.num_experts


def head_products(config: Config) -> int:
    """Number of entries of the output matrix, tied or not."""
    return config.model.vocab_size * config.model.hidden_size


def adapter_products(config: Config, factors: Sequence[str] = FACTORS) -> Counter[str]:
    """Number of entries of an adapter's factors in a layer, by the name of its matrix."""
    found = Counter()
    for name, parameter in trained_spec(config).layer.items():
        module, _, factor = name.removesuffix(".weight").rpartition(".")
        if factor in factors:
            found[f"{module}.weight"] += parameter.size
    return found


def trained_spec(config: Config) -> ModelSpec:
    """The model with its adapters, which knows what is trained."""
    spec, trainable = ModelSpec.from_config(config.model), config.optimizer.trainable
    return dataclasses.replace(spec, lora=config.lora.spec, trainable=trainable)


def matrix_flops(config: Config) -> float:
    """FLOP per token with matrices, forward and backward; a frozen matrix has no gradient."""
    spec, layers = trained_spec(config), config.model.num_layers
    matrices = {f"{LAYERS}{name}": layers * n for name, n in layer_products(config).items()}
    matrices[lm_head_name(spec)] = head_products(config)
    found = sum((6.0 if spec.trains(name) else 4.0) * n for name, n in matrices.items())
    return found + 6.0 * layers * adapter_products(config).total()
