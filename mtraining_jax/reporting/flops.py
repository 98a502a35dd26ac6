"""Floating point operations of a training step, and how much of the hardware's rate they are.

Two ways to count attention, which differ on purpose:

- *model FLOP*: what the mathematics needs. A pair of query and key takes 4 D forward (two matrix
  products) and 8 D backward (four), for each head. MFU is their rate over the hardware's.
- *executed FLOP*: what kernels do, as the benchmark tables count. Backward has a fifth product,
  for the logits are computed again, so 10 D; and whole tiles count, with their masked part.

A parameter of a matrix takes 6 FLOP a token: 2 forward, 4 backward. The token embedding is looked
up and not multiplied; the output layer is, even where it is the same table. Layers that are
computed again in the backward pass (model.remat) are counted once.
"""

import dataclasses

from mtraining_jax.config import Config
from mtraining_jax.models.families import family_of
from mtraining_jax.models.spec import ModelSpec
from mtraining_jax.sparsity import attention_flops, causal_pairs

# Dense bf16 FLOP/s by NVIDIA's data sheets, for the names that JAX gives. SXM modules only:
# others of the same name run slower.
PEAK_BF16_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H200": 989.4e12,
}


@dataclasses.dataclass(frozen=True)
class StepFlops:
    """FLOP of one optimizer step, forward and backward, all devices together.

    Attributes:
        matrices: in products with parameters.
        attention_executed: of attention, in whole tiles, five products backward.
        attention_dense: the same if every causal pair, S (S + 1) / 2 or those of documents, were
            computed.
        attention_model: of attention, computed pairs only, four products backward.
    """

    matrices: float
    attention_executed: float
    attention_dense: float
    attention_model: float

    @property
    def executed(self) -> float:
        """What the devices do."""
        return self.matrices + self.attention_executed

    @property
    def dense_equivalent(self) -> float:
        """What they would do if attention were dense."""
        return self.matrices + self.attention_dense

    @property
    def model(self) -> float:
        """What the step needs: what MFU counts."""
        return self.matrices + self.attention_model


def step_flops(
    config: Config, *, density: float, executed: float, causal: float = 1.0
) -> StepFlops:
    """Counts one step.

    Args:
        config: of the run.
        density: computed over causal pairs, mean over layers and heads.
        executed: pairs in executed tiles over causal pairs, also a mean.
        causal: causal pairs over the S (S + 1) / 2 of a whole sequence, which are fewer where it is
            made of documents.
    """
    model, data = config.model, config.data
    forward, backward = attention_flops(causal_pairs(data.seq_len), model.head_dim)
    heads = data.batch_size * model.num_layers * model.num_heads
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
    """FLOP of what measures sparse attention, all devices together, each time it is measured.

    Attributes:
        rows: of an audit's rows against all keys: seven products, of which three are forward, that
            leave no key out. Not counted: which keys are starved, which takes comparisons only.
        gradients: of the comparison of gradients: two forward and backward passes over the first
            tokens of a micro-batch, both counted with dense attention.
    """

    rows: float
    gradients: float

    def share(self, config: Config, step: float) -> float:
        """The mean share of a step, given the FLOP of one, over all steps of a run."""
        audit = config.audit
        rows = self.rows / audit.every_steps if audit.every_steps else 0.0
        gradients = self.gradients / audit.gradient_every if audit.gradient_every else 0.0
        return (rows + gradients) / step


def audit_flops(config: Config) -> AuditFlops:
    """Counts what `config.audit` measures, asked for or not."""
    model, data = config.model, config.data
    heads = data.batch_size * model.num_layers * model.num_heads
    short = config.gradient_tokens
    share = short / data.seq_len / config.optimizer.accumulation_steps
    dense = sum(attention_flops(causal_pairs(short), model.head_dim))
    attention = heads / config.optimizer.accumulation_steps * dense
    matrices = 6.0 * matrix_parameters(config) * config.tokens_per_step * share
    return AuditFlops(
        rows=14.0 * heads * config.audit.rows * data.seq_len * model.head_dim,
        gradients=2 * (matrices + attention),
    )


def matrix_parameters(config: Config) -> int:
    """Parameters that a token is multiplied by: all matrices but the embedding's look-up."""
    spec = ModelSpec.from_config(config.model)
    family = family_of(spec.family)
    layers = spec.num_layers * sum(family.layer_products(spec).values())
    return layers + family.head_products(spec)


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 FLOP/s of one device by its data sheet; None for those not listed here."""
    return PEAK_BF16_FLOPS.get(device_kind)
