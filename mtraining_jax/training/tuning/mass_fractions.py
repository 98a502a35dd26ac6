"""Dynamic sparsity tuning: mass fractions with which all data-parallel replicas end together.

After SparseBalance (arXiv 2604.13847). The anchor is the mean, minimum or maximum of the replicas'
predicted times at the configured fraction. Each replica takes the fraction that reaches the anchor,
within bounds. A replica that is too slow even at the lower bound takes the lower bound.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from mtraining_jax.cost_model.density import BEYOND, reach
from mtraining_jax.cost_model.kernel_times import AttentionSize, pack_ms
from mtraining_jax.training.tuning.density_response import DensityResponse, ReplicaDocuments

_ANCHORS = {"mean": np.mean, "min": np.min, "max": np.max}
_HALVINGS = 30


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Bounds of the tuned mass fraction around p0, the configured one: low <= base <= high."""

    base: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class TunedFractions:
    """Tuned mass fractions of a step.

    Attributes:
        fractions: float64 [M, L].
        infeasible: bool [M], replicas that are slower than the anchor even at the lower bound.
        untuned_ms: float64 [M], predicted attention times at p0.
        tuned_ms: float64 [M], predicted attention times at these fractions.
    """

    fractions: np.ndarray
    infeasible: np.ndarray
    untuned_ms: np.ndarray
    tuned_ms: np.ndarray


def tune_fractions(
    documents: Sequence[ReplicaDocuments],
    response: DensityResponse,
    assumed: np.ndarray,
    bounds: Bounds,
    anchor: str,
    size: AttentionSize,
) -> TunedFractions:
    """Tunes the mass fractions of a step; the result is the same on every process.

    `assumed` are densities at p0 by class before any measurement, float64 [K]; `anchor` is "mean",
    "min" or "max".
    """
    known = response.densities(assumed)
    untuned = np.array([replica_ms(own, known, 1.0, size) for own in documents])
    target = float(_ANCHORS[anchor](untuned))
    tuned = [_of_replica(own, response, known, bounds, target, size) for own in documents]
    fractions, times, infeasible = (np.array(x) for x in zip(*tuned, strict=True))
    return TunedFractions(fractions, infeasible, untuned, times)


def replica_ms(
    documents: ReplicaDocuments, known: np.ndarray, factor: float, size: AttentionSize
) -> float:
    """Predicted attention time if the density of sparse documents is `factor` times the known."""
    return pack_ms(documents.lengths, documents.densities(known, factor), size)


def _of_replica(
    documents: ReplicaDocuments,
    response: DensityResponse,
    known: np.ndarray,
    bounds: Bounds,
    target: float,
    size: AttentionSize,
) -> tuple[np.ndarray, float, bool]:
    """Returns fractions [L] of one replica, its predicted time, and whether it is infeasible."""
    base, exponents = bounds.base, response.exponents

    def at(growth: float) -> tuple[np.ndarray, float]:
        # `growth` is the log of how much the pairs of every layer grow, within the bounds.
        fractions = base + (BEYOND - base) * -np.expm1(-growth / exponents)
        fractions = np.clip(fractions, bounds.low, bounds.high)
        factor = float(response.growth(fractions, base).mean())
        return fractions, replica_ms(documents, known, factor, size)

    fractions, ms = at(0.0)
    if np.isclose(ms, target, rtol=1e-9, atol=0):
        return fractions, ms, False
    # Slightly more than any layer may move, so that after rounding all reach their bounds.
    furthest = 1.01 * float(exponents.max())
    low, high = (furthest * float(reach(x) - reach(base)) for x in (bounds.low, bounds.high))
    fractions, ms = at(low)
    if ms >= target:
        return fractions, ms, ms > target * (1 + 1e-9)
    fractions, ms = at(high)
    if ms <= target:
        return fractions, ms, False
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if at(middle)[1] > target else (middle, high)
    return *at(low), False
