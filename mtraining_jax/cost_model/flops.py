"""Floating point operations (FLOP) of a training step, and hardware peak rates for MFU.

Attention is counted in two ways:

- *Model FLOP*: required by the mathematics. Each query-key pair takes 4 D forward (two matrix
  products) and 8 D backward (four) per head. MFU is their rate over the hardware peak.
- *Executed FLOP*: done by the kernels, as in the benchmark tables. Backward recomputes the logits,
  a fifth product, so 10 D; and entire tiles count, with their masked part.

A matrix parameter takes 6 FLOP per token: 2 forward, 4 backward. The output layer counts, also with
tied embeddings; the token embedding is a lookup and does not. Rematerialized layers (model.remat)
count once.
"""

import dataclasses

from mtraining_jax.config import Config
from mtraining_jax.models.families import family_of
from mtraining_jax.models.spec import ModelSpec
from mtraining_jax.patterns import attention_flops, causal_pairs

# Dense bf16 FLOP/s from NVIDIA's data sheets, by JAX device kind. SXM modules only; other variants
# are slower.
PEAK_BF16_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H200": 989.4e12,
}


@dataclasses.dataclass(frozen=True)
class StepFlops:
    """FLOP of one optimizer step, forward and backward, on all devices.

    Attributes:
        matrices: products with parameters.
        attention_executed: attention in entire tiles, five products backward.
        attention_dense: the same for all causal pairs (within documents).
        attention_model: attention over computed pairs only, four products backward.
    """

    matrices: float
    attention_executed: float
    attention_dense: float
    attention_model: float

    @property
    def executed(self) -> float:
        """FLOP executed by the devices."""
        return self.matrices + self.attention_executed

    @property
    def dense_equivalent(self) -> float:
        """Executed FLOP with dense attention."""
        return self.matrices + self.attention_dense

    @property
    def model(self) -> float:
        """Model FLOP, as in MFU."""
        return self.matrices + self.attention_model


def step_flops(
    config: Config, *, density: float, executed: float, causal: float = 1.0
) -> StepFlops:
    """Counts the FLOP of one step.

    Args:
        config: the run.
        density: computed pairs over causal pairs, mean over layers and heads.
        executed: pairs in executed tiles over causal pairs, mean over layers and heads.
        causal: causal pairs over S (S + 1) / 2; less than 1 with documents.
    """
    model, data = config.model, config.data
    forward, backward = map(float, attention_flops(causal_pairs(data.seq_len), model.head_dim))
    heads: float = data.batch_size * model.num_layers * model.num_heads
    heads *= causal
    dense = heads * (forward + backward)
    return StepFlops(
        matrices=6.0 * matrix_parameters(config) * config.tokens_per_step,
        attention_executed=dense * executed,
        attention_dense=dense,
        attention_model=heads * density * (forward + backward * 4 / 5),
    )


@dataclasses.dataclass(frozen=True)
class AuditFlops:
    """FLOP of one audit on all devices.

    Attributes:
        rows: dense attention of the audited rows: seven products, three of them forward. Finding
            starved keys needs only comparisons, which do not count.
        gradients: comparison of gradients: two forward and backward passes over the first tokens of
            a micro-batch, both counted with dense attention.
    """

    rows: float
    gradients: float

    def share(self, config: Config, step: float) -> float:
        """Fraction of `step` FLOP that audits add, averaged over all steps of a run."""
        audit = config.audit
        rows = self.rows / audit.interval if audit.interval else 0.0
        gradients = self.gradients / audit.gradient_interval if audit.gradient_interval else 0.0
        return (rows + gradients) / step


def audit_flops(config: Config) -> AuditFlops:
    """Counts the FLOP of audits, whether enabled or not."""
    model, data = config.model, config.data
    heads = data.batch_size * model.num_layers * model.num_heads
    short = config.gradient_tokens
    share = short / data.seq_len / config.optimizer.accumulation_steps
    dense = sum(map(float, attention_flops(causal_pairs(short), model.head_dim)))
    attention = heads / config.optimizer.accumulation_steps * dense
    matrices = 6.0 * matrix_parameters(config) * config.tokens_per_step * share
    return AuditFlops(
        rows=14.0 * heads * config.audit.num_queries * data.seq_len * model.head_dim,
        gradients=2 * (matrices + attention),
    )


def matrix_parameters(config: Config) -> int:
    """Number of matrix parameters, without the token embedding lookup."""
    spec = ModelSpec.from_config(config.model)
    family = family_of(spec.family)
    layers = spec.num_layers * sum(family.layer_products(spec).values())
    return layers + family.head_products(spec)


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 FLOP/s of one device from its data sheet; None if unknown."""
    return PEAK_BF16_FLOPS.get(device_kind)
