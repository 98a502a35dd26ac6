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


def matrix_parameters(config: Config) -> int:
    """Parameters that a token is multiplied by: all matrices but the embedding's look-up."""
    spec = ModelSpec.from_config(config.model)
    family = family_of(spec.family)
    layers = spec.num_layers * sum(family.layer_products(spec).values())
    return layers + family.head_products(spec)


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 FLOP/s of one device by its data sheet; None for those not listed here."""
    return PEAK_BF16_FLOPS.get(device_kind)
