"""Measured rates of attention and matrix products on the H200, and the times they imply."""

import dataclasses
import math
from typing import Any

import numpy as np

# By head dimension, in order of density: (computed pairs over causal pairs; executed FLOP/s forward
# and backward on one H200, with five products per tile backward; fraction of these rates reached in
# ring attention of one layer on eight GPUs). Rates on one GPU:
#   0.8 %   mask A at S = 524288, benchmarks/results/attention-h200-2026-11-22-whole.md
#   6.3 %   mask B at S = 524288, benchmarks/results/archive-attention.md
#   17 %    the same: mask B forward runs at 579, 578 and 581 TFLOP/s at 8.8, 11.9 and 17.1 % (and
#           backward at 458, 450 and 428), S = 131072, 65536 and 32768 in the first file
#   dense   S = 131072, benchmarks/results/archive-{attention,ring}.md, 2026-11-22
# Ring: masks A, B and dense at S = 524288, gathered, "of one GPU's rate, same work" in
# benchmarks/results/ring-h200x8-2026-11-22.md, for head dimension 128; not measured for 64. The
# value at 17 % is interpolated. In entire steps other work hides this loss, so dry runs ignore it.
KERNEL_RATES = {
    64: (
        (0.008, 390e12, 347e12, 0.882),
        (0.063, 407e12, 366e12, 0.924),
        (0.17, 407e12, 366e12, 0.931),
        (1.0, 464e12, 495e12, 0.983),
    ),
    128: (
        (0.008, 527e12, 421e12, 0.882),
        (0.063, 540e12, 443e12, 0.924),
        (0.17, 540e12, 443e12, 0.931),
        (1.0, 615e12, 555e12, 0.983),
    ),
}
_RING = 8  # GPUs of the ring
# Scores per second of the kernels that sum a softmax by block: 16 of 128 queries, 16 heads of 128
# and 131072 tokens in 8.76 ms, benchmarks/results/archive-selection.md. Exponentials are the
# bottleneck, so head dimension 64 is not faster.
SCORES_PER_SECOND = 131072**2 / 2 * 16 * (16 / 128) / 8.76e-3
# How much faster scores of 8-bit keys are: the same selection takes 4.7 ms on an H100, its index
# included (benchmarks/results/selection-h200-2026-11-25.md; 72 ms at 524288 tokens).
FP8_SPEEDUP = 8.76 / (4.7 - 0.87)

# bf16 FLOP/s of a product of 8192^3: measured on one H200 with jax 0.11.2, CUDA 13.
_MATMUL_FLOPS = 794e12
# benchmarks/results/archive-step.md, 2026-11-22 (four GPUs, other models): everything except
# attention runs at 0.56 of that at hidden_size 896, at 0.71 at 2048 and at 0.74 at 3584. Fit: very
# wide models reach _MATMUL_SHARE, and half of it at _MATMUL_HALF_WIDTH, where norms, gates and
# casts take as long as the matrix products, which grow with the square of the width.
_MATMUL_SHARE = 0.87
_MATMUL_HALF_WIDTH = 480
# Those steps ran on two and four GPUs, so exposed collectives are included. A GPU that holds entire
# sequences has none. Without them the eight traces in
# benchmarks/results/archive-step.md and step-qwen3b-h200x8-2026-11-22.md, at hidden_size 2048, run
# at 567 to 606 TFLOP/s, 579.5 on average; the share above gives 560.
_MATMUL_SHARE_ALONE = 0.90


def matmul_rate(hidden_size: int, ranks: int) -> float:
    """FLOP/s of one GPU in a training step, without attention."""
    share = _MATMUL_SHARE if ranks > 1 else _MATMUL_SHARE_ALONE
    return _MATMUL_FLOPS * share / (1 + _MATMUL_HALF_WIDTH / hidden_size)


def rates_at(head_dim: int, density: float | np.ndarray) -> tuple[Any, ...]:
    """FLOP/s forward and backward, and the fraction of them in a ring, at densities of any shape.

    Interpolates linearly. Head dimensions missing in the table use the nearest one, which is good
    enough to compare sequences, but not to predict times.
    """
    rows = KERNEL_RATES[min(KERNEL_RATES, key=lambda known: abs(known - head_dim))]
    densities, *columns = zip(*rows, strict=True)
    return tuple(np.interp(density, densities, column) for column in columns)


def kernel_seconds(head_dim: int, density: float, forward: float, backward: float) -> float:
    """Time of the attention kernels on one GPU, from the executed FLOP of each pass."""
    rate_forward, rate_backward, _ = rates_at(head_dim, density)
    return float(forward / rate_forward + backward / rate_backward)


@dataclasses.dataclass(frozen=True)
class AttentionSize:
    """Sizes of the model and of the ring that determine the time of attention."""

    num_layers: int
    num_heads: int
    head_dim: int
    ranks: int = 1  # context-parallel size, W
    block_size: int = 128  # documents are padded to its multiples
    passes: int = 1  # forward passes per step; 2 if the backward pass recomputes attention


def documents_ms(lengths: np.ndarray, densities: np.ndarray, size: AttentionSize) -> np.ndarray:
    """Predicted milliseconds of attention per document, forward and backward, float64 [d].

    ``t = layers * Hq * D * P * (4 * passes / R_f + 10 / R_b) / (W * e)``, with P computed pairs per
    head, R the kernel rates, and e their fraction in a ring of W GPUs: it falls with log(W) to the
    value measured with 8. `lengths` [d] are without padding, `densities` [d] over causal pairs.
    """
    lengths = np.asarray(lengths, np.int64)
    padded = -(-lengths // size.block_size) * size.block_size
    densities = np.broadcast_to(np.asarray(densities, np.float64), padded.shape)
    pairs = densities * padded * (padded + 1.0) / 2
    forward, backward, in_ring = rates_at(size.head_dim, densities)
    kept = 1 - (1 - in_ring) * min(math.log(size.ranks, _RING), 1.0)
    flops = 4.0 * size.passes / forward + 10.0 / backward
    work = size.num_layers * size.num_heads * size.head_dim * pairs
    return 1e3 * work * flops / (size.ranks * kept)


def pack_ms(lengths: np.ndarray, densities: np.ndarray, size: AttentionSize) -> float:
    """Predicted milliseconds of attention for one packed sequence."""
    return float(documents_ms(lengths, densities, size).sum())
