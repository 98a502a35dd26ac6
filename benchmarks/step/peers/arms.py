"""The models and the ways to train them. Needs neither JAX nor torch."""

import dataclasses
import os

import numpy as np

INIT_STDDEV = 0.02  # of all matrices
RMS_NORM_EPS, ROPE_THETA = 1e-6, 1e6
LEARNING_RATE, CLIP_NORM = 2e-5, 1.0
# Density of `sampled_rows` (tau 0.9) in Qwen2.5-Coder-1.5B: before training at 32768 tokens, while
# training at longer sequences (benchmarks/results/frontier-32768-coder-h200-2026-11-26.md,
# docs/quality.md, benchmarks/results/step-coder-h200-2026-11-26.md). At 8192 it is not measured,
# and 0.3 is the highest density that a replay computes.
DENSITIES = {8192: 0.3, 32768: 0.211, 131072: 0.116, 262144: 0.078, 524288: 0.046}
CHUNK = 1024  # tokens with logits in memory at a time, where the loss has chunks


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A model of the Qwen2 family with tied embeddings; fields as in `ModelConfig`."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int

    def tokens(self, count: int) -> np.ndarray:
        """Draws the tokens that all arms train on, int32 [1, count]."""
        return np.random.default_rng(0).integers(self.vocab_size, size=(1, count), dtype=np.int32)


MODELS = {
    "Qwen2.5-1.5B": Sizes(151936, 1536, 28, 12, 2, 128, 8960),
    "tiny": Sizes(256, 64, 2, 2, 1, 32, 128),
}


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way to train.

    Attributes:
        title: in the table.
        module: in this folder, with a class `Step`.
        recipe: what it does, for the reader of the table.
        variant: argument of `Step`.
        own: of this library.
        compiled: reserves the memory of a whole step when the step starts.
        whole_logits: stores the logits of all tokens.
    """

    title: str
    module: str
    recipe: str
    variant: str = ""
    own: bool = False
    compiled: bool = True
    whole_logits: bool = False


_FP32 = "weights, gradients and moments in fp32, computes in bf16"
_TORCH = (
    'weights, gradients and moments in bf16, `attn_implementation="sdpa"` without a mask, '
    "gradient checkpointing of each layer (not reentrant, recomputes attention), `use_cache=False`,"
    " fused AdamW, eager"
)
_FLAX = (
    f'Linen, {_FP32}; `jax.nn.dot_product_attention(implementation="cudnn")`, `nn.scan` over '
    "`nn.remat` of each layer (recomputes attention), `optax.adamw`, donated state"
)
_OWN = (
    f'{_FP32}; `remat = "attention"` (does not recompute attention), loss in chunks of {CHUNK} '
    "tokens"
)
ARMS = {
    "transformers": Arm(
        "transformers", "torch_step", f"{_TORCH}; the model's loss on all logits in fp32",
        compiled=False, whole_logits=True,
    ),
    "transformers-liger": Arm(
        "transformers, Liger kernels", "torch_step",
        f"{_TORCH}; with Liger's RMSNorm, RoPE, SwiGLU and fused linear cross-entropy",
        "liger", compiled=False,
    ),
    "flax": Arm("Flax", "flax_step", f"{_FLAX}; loss on all logits in fp32", whole_logits=True),
    "flax-chunked": Arm(
        "Flax, loss in chunks", "flax_step",
        f"{_FLAX}; loss in chunks of {CHUNK} tokens under `jax.checkpoint`", "chunked",
    ),
    "dense": Arm("mtraining-jax, dense", "own_step", _OWN, "dense", own=True),
    "sparse": Arm(
        "mtraining-jax, sparse", "own_step",
        f"{_OWN}; `sampled_rows` selects in every layer, but with random weights it would keep "
        "nearly all blocks, so random lists are computed, with the density that was measured in "
        "Qwen2.5-Coder-1.5B (at 8192 tokens not measured: the highest that a replay computes)",
        "sparse", own=True,
    ),
}  # fmt: skip


def density_at(tokens: int) -> float:
    """Density to replay, a power of the length between the lengths of the table."""
    lengths, densities = (np.log(np.array(list(x))) for x in (DENSITIES, DENSITIES.values()))
    return round(float(np.exp(np.interp(np.log(tokens), lengths, densities))), 4)


def on_cpu() -> bool:
    """Whether the environment asks for the CPU, as tests do; otherwise a GPU is needed."""
    return os.environ.get("JAX_PLATFORMS") == "cpu"
