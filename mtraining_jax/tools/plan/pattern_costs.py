"""Forecasts of the selection cost, density and index size of a pattern.

A method of the pattern with a function's name and further arguments takes precedence over it.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from mtraining_jax.patterns.adaspa import AdaSpa
from mtraining_jax.patterns.base import Pattern
from mtraining_jax.patterns.block_topk import BlockTopK
from mtraining_jax.patterns.budgets import BudgetPattern
from mtraining_jax.patterns.dense import Dense
from mtraining_jax.patterns.flex_prefill import FlexPrefill
from mtraining_jax.patterns.moba import MoBA
from mtraining_jax.patterns.probe_pattern import ProbePattern
from mtraining_jax.patterns.row_pattern import RowPattern
from mtraining_jax.patterns.sampled_rows import SampledRows
from mtraining_jax.patterns.xattention import XAttention

# (tokens of a sequence, density), ascending.
#
# Lists per row of blocks: sampled rows at tau 0.9 with a trained Qwen2.5-Coder-1.5B, from
# benchmarks/results/density-by-length-h200-2026-11-30.md. At 1048576 tokens the mean of three texts
# (0.039 to 0.087); the last entry continues the power of -0.30 of the first five.
_LISTS = (
    (8192, 0.264), (16384, 0.209), (32768, 0.174), (65536, 0.138), (131072, 0.113),
    (524288, 0.085), (1048576, 0.062), (4194304, 0.040),
)  # fmt: skip
_LISTS_SHARE = 0.9
# Vertical-slash at top-p 0.9 with SmolLM2-135M (there: frontier-8192-h200-2026-11-22.md,
# frontier-32768-h200-2026-11-22.md and step-patterns-h200-2026-11-23.md), and at 524288 tokens the
# mean reported by MTraining (arXiv 2510.18830, section 5).
_VERTICAL_SLASH = ((8192, 0.441), (32768, 0.365), (131072, 0.212), (524288, 0.063))

# Computed pairs grow with the mass fraction p as a power of 1 / (1.08 - p): sampled rows of
# SmolLM2-135M at 32768 tokens keep 9.6, 11.8, 15.2 and 21.5 % of the pairs at mass fractions of
# 0.8, 0.85, 0.9 and 0.95 (benchmarks/results/frontier-32768-h200-2026-11-22.md), that is, exponents
# of 1.05, 1.03 and 1.07 between them. With p or 1 - p as base, the exponents would differ by two
# thirds or two fifths.
BEYOND = 1.08
EXPONENT = 1.05


def reach(shares: np.ndarray | float) -> np.ndarray:
    """Returns ln(1 / (1.08 - p)); the logarithm of computed pairs grows in proportion to it."""
    return -np.log(BEYOND - np.asarray(shares))


def density_of_lists(tokens: int, share: float = _LISTS_SHARE) -> float:
    """Returns the expected density of patterns with block lists per query block, at most 1.

    `tokens` is clamped to the measured range; `share` is the fraction of the estimated mass kept.
    """
    growth = np.exp(EXPONENT * (reach(share) - reach(_LISTS_SHARE)))
    return min(1.0, float(_between(_LISTS, tokens) * growth))


def density_of_window(window: int, tokens: int) -> float:
    """Returns the density of a sliding window."""
    seen = min(window, tokens)
    return (seen * tokens - seen * (seen - 1) / 2) / (tokens * (tokens + 1) / 2)


def _between(measured: tuple[tuple[int, float], ...], tokens: int) -> float:
    """Interpolates log density linearly in log length."""
    lengths, densities = np.log(measured).T
    return float(np.exp(np.interp(np.log(tokens), lengths, densities)))


_LISTS_MEASURED = "assumed by length, as measured with Qwen2.5-Coder-1.5B; texts differ by ± 50 %"
_COLUMNS_MEASURED = "assumed by length, as measured with SmolLM2-135M and, at 512K, by MTraining"
_NOT_KNOWN = "ASSUMED: not known for this pattern; define expected_density in its class"


def _method_first[T](table: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(table)
    def cost(pattern: Pattern, *args: Any, **named: Any) -> T:
        method = getattr(pattern, table.__name__, None)
        return table(pattern, *args, **named) if method is None else method(*args, **named)

    return cost


@_method_first
def expected_density(pattern: Pattern, tokens: int) -> tuple[float, str]:
    """Returns the density to expect of sequences or documents of some tokens, and why."""
    exact = "exact: it depends only on the length"
    is_user_pattern = not type(pattern).__module__.startswith("mtraining_jax.")
    match pattern:
        case Dense():
            return 1.0, "dense"
        case RowPattern():
            selected = density_of_lists(tokens, pattern.tau)
            density = selected + pattern.random_block_prob * (1 - selected)
            return density, _NOT_KNOWN if is_user_pattern else _LISTS_MEASURED
        case FlexPrefill():
            # No published mean density of arXiv 2502.20766's settings is known.
            return density_of_lists(tokens), "assumed: as for patterns with lists per row of blocks"
        case MoBA():
            size, pairs = pattern.chunk_size, 0
            for chunk in range(-(-tokens // size)):
                own = min(size, tokens - chunk * size)
                pairs += own * (own + 1) // 2 + own * min(chunk, pattern.top_k - 1) * size
            return pairs / (tokens * (tokens + 1) // 2), exact
        case BlockTopK():
            rows = pattern.blocks(tokens)
            tiles = sum(min(row, pattern.top_blocks - 1) + 0.5 for row in range(rows))
            return tiles / (rows * rows / 2), exact
        case AdaSpa():
            return 1 - pattern.sparsity, "1 - sparsity"
    why = _NOT_KNOWN if is_user_pattern else _COLUMNS_MEASURED
    return _between(_VERTICAL_SLASH, tokens), why


@_method_first
def selects_an_index(pattern: Pattern) -> bool:
    """Whether a step selects an index, used or not."""
    return pattern.selects


@_method_first
def scoring_share(pattern: Pattern) -> float:
    """FLOP of scoring pairs over those of a dense forward pass; 0 if probe queries are few."""
    match pattern:
        case SampledRows():
            return pattern.probe_queries_per_block / (2 * pattern.block_size)
        case XAttention():
            return 1 / (2 * pattern.stride)
        case FlexPrefill() if pattern.js_threshold:
            return 1 / pattern.block_size**2  # One product per pair of blocks.
        case MoBA():
            return 1 / pattern.chunk_size  # One product per query and chunk, of two per pair.
        case BlockTopK():
            return 0.5 / pattern.block_size**2
        case AdaSpa():
            return 0.5  # One of the two products of a forward pass.
    return 0.0


@_method_first
def softmax_share(pattern: Pattern) -> float:
    """Scores that go through a softmax, as a fraction of all pairs; it may be the slower part."""
    match pattern:
        case SampledRows():
            return pattern.probe_queries_per_block / pattern.block_size
        case AdaSpa():
            return 1.0
    return 0.0


@_method_first
def scores_fp8_keys(pattern: Pattern) -> bool:
    """Whether the Hopper kernel scores keys in 8 bits (`pallas_kernels.fp8_scores`)."""
    return isinstance(pattern, SampledRows) and not pattern.columns


@_method_first
def capacities(pattern: Pattern, num_blocks: int, documents: bool = False) -> tuple[int, int]:
    """Returns the int32 numbers an index stores per head, and how many are gathered columns."""
    row_bits, column_bits = -(-num_blocks // 32), -(-pattern.block_size // 32)
    match pattern:
        case Dense():
            # Beginning and end of each block's document.
            return 2 * num_blocks if documents else 0, 0
        case SampledRows() if pattern.columns:
            # One bit per block and per token, and with documents a number per row.
            columns = min(pattern.columns, num_blocks * pattern.block_size)
            columns = pattern.document_columns(num_blocks) if documents else columns
            return num_blocks * (row_bits + column_bits + documents), columns
        case RowPattern() | FlexPrefill() | BlockTopK():
            # One bit per block; ranks share the rows.
            return num_blocks * row_bits, 0
        case MoBA():
            # One bit per query and chunk, and a number per row of blocks; ranks share the rows.
            return num_blocks * (pattern.block_size * -(-_chunks(pattern, num_blocks) // 32) + 1), 0
        case BudgetPattern() if pattern.max_verticals is None:
            # Those of the largest budgets of any layer.
            return capacities(pattern.read(), num_blocks, documents)
        case ProbePattern() if documents:
            # One bit per block and per token, and a number per row of blocks.
            words = row_bits + column_bits
            return num_blocks * (words + 1), pattern.document_columns(num_blocks)
        case ProbePattern():
            columns, diagonals = pattern.list_capacities(num_blocks)
            return diagonals + columns + 2, columns
    # A `BlockSparseIndex` with room for every block.
    return 2 * num_blocks * (num_blocks + 1), 0


@_method_first
def query_copies(pattern: Pattern, num_blocks: int) -> int:
    """Number of copies of all queries and outputs that a layer needs."""
    if not isinstance(pattern, MoBA):
        return 0
    # One for each chunk that a query sees in addition to its own.
    return min(pattern.top_k, _chunks(pattern, num_blocks)) - 1


def _chunks(pattern: MoBA, num_blocks: int) -> int:
    return -(-num_blocks * pattern.block_size // pattern.chunk_size)
