"""Densities to expect before anything is chosen: what was measured, between and by length."""

import numpy as np

# Pairs over causal ones by tokens of a sequence, in order; (tokens, density).
#
# Lists for each row of blocks: sampled rows kept to 0.9 with SmolLM2-135M, on H200s; in
# benchmarks/results frontier-8192-h200-2026-11-22.md, frontier-32768-h200-2026-11-22.md,
# frontier-65536-h200-2026-11-24.md, step-patterns-h200-2026-11-23.md and, in the mean of its steps,
# step-chosen-524288-h200-2026-11-24.md.
_LISTS = ((8192, 0.233), (32768, 0.152), (65536, 0.109), (131072, 0.100), (524288, 0.046))
_LISTS_SHARE = 0.9
# Vertical-slash kept to 0.9 with the same model (the same files), and at 524288 tokens the mean
# that MTraining reports (arXiv 2510.18830, section 5).
_VERTICAL_SLASH = ((8192, 0.441), (32768, 0.365), (131072, 0.212), (524288, 0.063))

# Pairs grow with the share p of the mass that is kept as a power of 1 / (1.08 - p): sampled rows of
# SmolLM2-135M at 32768 tokens keep 9.6, 11.8, 15.2 and 21.5 % of the pairs at shares of 0.8, 0.85,
# 0.9 and 0.95 (benchmarks/results/frontier-32768-h200-2026-11-22.md), which are exponents of 1.05,
# 1.03 and 1.07 between them. By p itself, or by 1 - p, they would differ by two thirds, or by two
# fifths.
BEYOND = 1.08
EXPONENT = 1.05


def reach(shares: np.ndarray | float) -> np.ndarray:
    """ln of 1 / (1.08 - p): the logarithm of pairs grows in proportion to it."""
    return -np.log(BEYOND - np.asarray(shares))


def density_of_lists(tokens: int, share: float = _LISTS_SHARE) -> float:
    """Density to expect of lists of blocks that each row of blocks chooses.

    Args:
        tokens: of a sequence, or of a document in one.
        share: of the estimated mass that is kept, 0 to 1.

    Returns:
        Computed over causal pairs, at most 1. Outside of the measured lengths that of the nearest.
    """
    growth = np.exp(EXPONENT * (reach(share) - reach(_LISTS_SHARE)))
    return min(1.0, float(_between(_LISTS, tokens) * growth))


def density_of_vertical_slash(tokens: int) -> float:
    """Density to expect of columns and diagonals that the last queries choose.

    Args:
        tokens: of a sequence, or of a document in one.

    Returns:
        Computed over causal pairs. Outside of the measured lengths that of the nearest.
    """
    return _between(_VERTICAL_SLASH, tokens)


def _between(measured: tuple[tuple[int, float], ...], tokens: int) -> float:
    """Interpolates the logarithm of the density by that of the length."""
    lengths, densities = np.log(measured).T
    return float(np.exp(np.interp(np.log(tokens), lengths, densities)))
