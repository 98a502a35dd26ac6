"""Mass fractions with which all data-parallel replicas end together.

After SparseBalance (arXiv 2604.13847). The anchor is the mean, minimum or maximum of the replicas'
predicted times at the configured fraction. Each replica takes the fraction that reaches the anchor,
or the nearest bound.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from mtraining_jax.tools.balance.density_response import DensityResponse, ReplicaDocuments
from mtraining_jax.tools.plan.kernel_times import AttentionSize, pack_ms
from mtraining_jax.tools.plan.pattern_costs import BEYOND, reach

_ANCHORS = {"mean": np.mean, "min": np.min, "max": np.max}
_HALVINGS = 30


@dataclasses.dataclass(frozen=True)
class TunedFractions:
    """Mass fractions [M, L] of a step, and attention times [M] predicted at p0 and at these.

    Replicas that are slower than the anchor even at the lower bound are infeasible, bool [M].
    """

    fractions: np.ndarray
    infeasible: np.ndarray
    untuned_ms: np.ndarray
    tuned_ms: np.ndarray


@dataclasses.dataclass(frozen=True)
class FractionTuning:
    """Tunes fractions between two bounds around p0, to the anchor `mean`, `min` or `max`."""

    low: float
    high: float
    anchor: str
    size: AttentionSize

    def tune(
        self, documents: Sequence[ReplicaDocuments], response: DensityResponse
    ) -> TunedFractions:
        untuned = np.array([self.ms(own, response, 1.0) for own in documents])
        target = float(_ANCHORS[self.anchor](untuned))
        tuned = [self._tune_replica(own, response, target) for own in documents]
        fractions, times, infeasible = (np.array(x) for x in zip(*tuned, strict=True))
        return TunedFractions(fractions, infeasible, untuned, times)

    def ms(self, documents: ReplicaDocuments, response: DensityResponse, factor: float) -> float:
        """Predicts the attention time with `factor` times the density of sparse documents at p0."""
        densities = documents.densities(response.densities, factor)
        return pack_ms(documents.lengths, densities, self.size)

    def _tune_replica(
        self, documents: ReplicaDocuments, response: DensityResponse, target: float
    ) -> tuple[np.ndarray, float, bool]:
        """Returns the fractions [L] of a replica, its time, and whether it is infeasible."""
        base, exponents = response.base, response.exponents

        def at(growth: float) -> tuple[np.ndarray, float]:
            # `growth` is the log of how much the pairs of every layer grow, within the bounds.
            fractions = base + (BEYOND - base) * -np.expm1(-growth / exponents)
            fractions = np.clip(fractions, self.low, self.high)
            factor = float(response.growth(fractions).mean())
            return fractions, self.ms(documents, response, factor)

        fractions, ms = at(0.0)
        if np.isclose(ms, target, rtol=1e-9, atol=0):
            return fractions, ms, False
        # Slightly more than any layer may move, so that after rounding all reach their bounds.
        furthest = 1.01 * float(exponents.max())
        low, high = (furthest * float(reach(x) - reach(base)) for x in (self.low, self.high))
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
