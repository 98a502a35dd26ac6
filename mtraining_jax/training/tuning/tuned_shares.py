"""Dynamic sparsity tuning: mass fractions with which all data-parallel replicas end together.

After SparseBalance (arXiv 2604.13847). The anchor is the mean, minimum or maximum of the replicas'
predicted times at the configured fraction. Each replica takes the fraction that reaches the anchor,
within bounds. A replica that is too slow even at the lower bound takes the lower bound.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from mtraining_jax.cost_model.density import reach
from mtraining_jax.cost_model.kernel_times import AttentionSize, pack_ms
from mtraining_jax.training.tuning.share_response import GroupDocuments, ShareResponse, share_at

_ANCHORS = {"mean": np.mean, "min": np.min, "max": np.max}
_HALVINGS = 30


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Bounds of the tuned mass fraction around p0, the configured one: low <= base <= high."""

    base: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class TunedShares:
    """Tuned mass fractions of a step.

    Attributes:
        shares: float64 [M, L].
        infeasible: bool [M], replicas that are slower than the anchor even at the lower bound.
        untuned_ms: float64 [M], predicted attention times at p0.
        tuned_ms: float64 [M], predicted attention times at these fractions.
    """

    shares: np.ndarray
    infeasible: np.ndarray
    untuned_ms: np.ndarray
    tuned_ms: np.ndarray


def tuned_shares(
    documents: Sequence[GroupDocuments],
    response: ShareResponse,
    assumed: np.ndarray,
    bounds: Bounds,
    anchor: str,
    size: AttentionSize,
) -> TunedShares:
    """Tunes the mass fractions of a step; the result is the same on every process.

    `assumed` are densities at p0 by class before any measurement, float64 [K]; `anchor` is "mean",
    "min" or "max".
    """
    known = response.densities(assumed)
    untuned = np.array([_ms(own, known, 1.0, size) for own in documents])
    target = float(_ANCHORS[anchor](untuned))
    found = [_of_group(own, response, known, bounds, target, size) for own in documents]
    shares, times, infeasible = (np.array(x) for x in zip(*found, strict=True))
    return TunedShares(shares, infeasible, untuned, times)


def _of_group(
    documents: GroupDocuments,
    response: ShareResponse,
    known: np.ndarray,
    bounds: Bounds,
    target: float,
    size: AttentionSize,
) -> tuple[np.ndarray, float, bool]:
    """Returns fractions [L] of one replica, its predicted time, and whether it is infeasible."""
    exponents = response.exponents

    def at(growth: float) -> tuple[np.ndarray, float]:
        # `growth` is the log of how much the pairs of every layer grow, within the bounds.
        shares = share_at(bounds.base, growth / exponents)
        shares = np.clip(shares, bounds.low, bounds.high)
        return shares, _ms(documents, known, float(response.factor(shares, bounds.base)), size)

    here, ms = at(0.0)
    if np.isclose(ms, target, rtol=1e-9, atol=0):
        return here, ms, False
        # Slightly more than any layer may move, so that after rounding all reach their bounds.
    furthest = 1.01 * float(exponents.max())
    least, most = (
        furthest * float(reach(bound) - reach(bounds.base)) for bound in (bounds.low, bounds.high)
    )
    lowest, fastest = at(least)
    if fastest >= target:
        return lowest, fastest, fastest > target * (1 + 1e-9)
    highest, slowest = at(most)
    if slowest <= target:
        return highest, slowest, False
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        least, most = (least, middle) if at(middle)[1] > target else (middle, most)
    return *at(least), False


def _ms(documents: GroupDocuments, known: np.ndarray, factor: float, size: AttentionSize) -> float:
    return pack_ms(documents.lengths, documents.densities(known, factor), size)
