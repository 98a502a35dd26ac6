"""How long attention and matrix products take on H200s: a table of measured rates.

The dry run, the balance of groups and their reports all read it here. It takes numbers only, and
imports neither JAX nor a configuration.
"""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class KernelRates:
    """Rates of the attention kernels on one H200 at one density.

    Attributes:
        density: computed over causal pairs.
        forward, backward: executed FLOP/s. Backward counts five products for each tile, as the
            benchmark tables do.
        in_ring: share of these rates that eight GPUs keep which do nothing but one layer's ring.
    """

    density: float
    forward: float
    backward: float
    in_ring: float


# By head width, in order of density. Rates, one GPU:
#   0.8 %   mask A at S = 524288, benchmarks/results/attention-h200-2026-11-22-whole.md
#   6.3 %   mask B at S = 524288, benchmarks/results/attention-h200-2026-11-21-in-step.md
#   17 %    the same: mask B forward runs at 579, 578 and 581 TFLOP/s at 8.8, 11.9 and 17.1 % (and
#           backward at 458, 450 and 428), S = 131072, 65536 and 32768 in the first file
#   dense   S = 131072, benchmarks/results/{attention-h200,ring-h200x2}-2026-11-22.md
# Ring: masks A, B and dense at S = 524288, gathered, "of one GPU's rate, same work" in
# benchmarks/results/ring-h200x8-2026-11-22.md, of heads 128 wide; not measured for 64. At 17 % it
# is what lies between. In whole steps other work hides this loss: a dry run counts none of it.
KERNEL_RATES: dict[int, tuple[KernelRates, ...]] = {
    64: (
        KernelRates(0.008, 390e12, 347e12, 0.882),
        KernelRates(0.063, 407e12, 366e12, 0.924),
        KernelRates(0.17, 407e12, 366e12, 0.931),
        KernelRates(1.0, 464e12, 495e12, 0.983),
    ),
    128: (
        KernelRates(0.008, 527e12, 421e12, 0.882),
        KernelRates(0.063, 540e12, 443e12, 0.924),
        KernelRates(0.17, 540e12, 443e12, 0.931),
        KernelRates(1.0, 615e12, 555e12, 0.983),
    ),
}
_RING = 8  # GPUs that `in_ring` is of
# Scores a second of the kernels that sum a softmax by block: 16 of 128 queries, 16 heads of 128 and
# 131072 tokens in 8.76 ms, benchmarks/results/choice-h200-2026-11-23.md. What they wait for is
# exponentials, so heads of 64 are no faster.
SCORES_PER_SECOND = 131072**2 / 2 * 16 * (16 / 128) / 8.76e-3

# bf16 FLOP/s of a product of 8192^3: measured on one H200 with jax 0.11.2, CUDA 13.
_MATMUL_FLOPS = 794e12
# benchmarks/results/step-{qwen3b-512k-h200x4,others-h200x2}-2026-11-22.md: all but attention runs
# at 0.56 of that in a model 896 wide, at 0.71 with 2048 and at 0.74 with 3584. So a very wide
# model reaches this share of it, and half of that where its width is the other number, as its
# norms, gates and casts then take as long as its products, which grow with the width's square.
_MATMUL_SHARE = 0.87
_MATMUL_HALF_WIDTH = 480
# Those steps ran on two and four GPUs, and collectives that nothing hides are in the rate. A GPU
# that has its sequences to itself waits for none. Without them the eight traces in
# benchmarks/results/step-qwen3b-*-2026-11-22*.md, 2048 wide, run at 567 to 606 TFLOP/s, 579.5 in
# the mean, where the share above gives 560.
_MATMUL_SHARE_ALONE = 0.90


def matmul_rate(hidden_size: int, ranks: int) -> float:
    """FLOP/s of one GPU in a training step without its attention.

    Args:
        hidden_size: width of the model.
        ranks: GPUs that share one sequence.
    """
    share = _MATMUL_SHARE if ranks > 1 else _MATMUL_SHARE_ALONE
    return _MATMUL_FLOPS * share / (1 + _MATMUL_HALF_WIDTH / hidden_size)


def rates_at(head_dim: int, density: float | np.ndarray) -> tuple[np.ndarray, ...]:
    """Rates of the kernels at given densities: linear between those of the table, none beyond.

    Args:
        head_dim: D. A width that is not in the table takes the rates of the nearest one: fit for
            comparing sequences with each other, not for a time (`KERNEL_RATES` has what is known).
        density: in [0, 1], of any shape.

    Returns:
        ``(forward, backward, in_ring)``, float64 each, as in `KernelRates`.
    """
    rows = KERNEL_RATES[min(KERNEL_RATES, key=lambda known: abs(known - head_dim))]
    at = [row.density for row in rows]
    return tuple(
        np.interp(density, at, [getattr(row, name) for row in rows])
        for name in ("forward", "backward", "in_ring")
    )


def kernel_seconds(head_dim: int, density: float, forward: float, backward: float) -> float:
    """Time of the attention kernels alone on one GPU.

    Args:
        head_dim: D.
        density: of the pairs they compute.
        forward, backward: executed FLOP of each pass.
    """
    rate_forward, rate_backward, _ = rates_at(head_dim, density)
    return float(forward / rate_forward + backward / rate_backward)


@dataclasses.dataclass(frozen=True)
class AttentionSize:
    """What the time of attention depends on besides the documents.

    Attributes:
        num_layers: layers of the model.
        num_heads: query heads, Hq.
        head_dim: D.
        ranks: GPUs that share one sequence, W.
        block_size: g, tokens of a block, to which documents are filled up.
        passes: forward passes of attention in a step; 2 where the backward pass repeats it.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    ranks: int = 1
    block_size: int = 128
    passes: int = 1


def documents_ms(
    lengths: np.ndarray, densities: np.ndarray, size: AttentionSize
) -> np.ndarray:
    """Predicted time of attention over each document, forward and backward, in all layers.

    ``t = layers * Hq * D * P * (4 * passes / R_f + 10 / R_b) / (W * e)``: P pairs of a head that
    are computed, R the kernels' rates at the density, e the share of them that a ring of W keeps,
    which falls with the logarithm of W to the one measured with 8, and is not known beyond. The
    rest of a step is not in it, and neither is the choice of an index.

    Args:
        lengths: integers [d], real tokens of each document.
        densities: floats [d] (or one number), computed over causal pairs.
        size: of the model, and of the ring.

    Returns:
        Milliseconds, float64 [d].
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
    """Predicted milliseconds of attention over one sequence of documents: see `documents_ms`."""
    return float(documents_ms(lengths, densities, size).sum())
