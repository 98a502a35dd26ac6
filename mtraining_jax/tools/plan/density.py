"""Expected densities before any selection: measured values, interpolated by length."""

import numpy as np

# (tokens of a sequence, density), ascending.
#
# Lists per row of blocks: sampled rows at tau 0.9 with SmolLM2-135M, on H200s; from
# benchmarks/results frontier-8192-h200-2026-11-22.md, frontier-32768-h200-2026-11-22.md,
# frontier-65536-h200-2026-11-24.md, step-patterns-h200-2026-11-23.md and, as the mean of its steps,
# step-chosen-524288-h200-2026-11-24.md.
_LISTS = ((8192, 0.233), (32768, 0.152), (65536, 0.109), (131072, 0.100), (524288, 0.046))
_LISTS_SHARE = 0.9
# Vertical-slash at top-p 0.9 with the same model (the same files), and at 524288 tokens the mean
# reported by MTraining (arXiv 2510.18830, section 5).
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


def density_of_vertical_slash(tokens: int) -> float:
    """Returns the expected density of vertical-slash patterns; lengths as in `density_of_lists`."""
    return _between(_VERTICAL_SLASH, tokens)


def density_of_window(window: int, tokens: int) -> float:
    """Returns the density of a sliding window."""
    seen = min(window, tokens)
    return (seen * tokens - seen * (seen - 1) / 2) / (tokens * (tokens + 1) / 2)


def _between(measured: tuple[tuple[int, float], ...], tokens: int) -> float:
    """Interpolates log density linearly in log length."""
    lengths, densities = np.log(measured).T
    return float(np.exp(np.interp(np.log(tokens), lengths, densities)))
