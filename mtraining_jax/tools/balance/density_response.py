"""Models how density responds to the mass fraction, fitted to the finished steps of a run.

The model has three parts. Documents of a length class have a density at the configured fraction
p0. Dense documents have density 1. The density of all others grows with the fraction p as a power
of 1 / (1.08 - p), with one exponent per layer. SparseBalance (arXiv 2604.13847) instead reads
times from a profiled table of lengths and densities; here each run fits its own data.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from mtraining_jax.data.balance import length_classes
from mtraining_jax.tools.plan.pattern_costs import EXPONENT, reach
from mtraining_jax.utils.errors import UserError

_LEAST, _MOST = 0.1, 10.0  # limits of an exponent
# The prior has the weight of replicas with fractions that spread by 0.04 around 0.9.
_START_VARIANCE = 0.05
# Decay of the moving averages per step, of densities and of exponents. Replicas with long documents
# use lower fractions, so the effect of length must be fitted before that of the fraction.
_KEEP_LEVEL, _KEEP_SLOPE = 0.8, 0.98
_FITTED = ("level", "covariance", "variance")


class ReplicaDocuments:
    """The documents of one data-parallel replica in a step.

    `rows` are the document lengths of each sequence. Documents with fewer tokens than
    `min_sparse_tokens`, including padding, use dense attention. `sparse_weight`, at most 1, is the
    weight of the others in the density of the replica.
    """

    def __init__(self, rows: Sequence[np.ndarray], block_size: int, min_sparse_tokens: int) -> None:
        self.lengths = np.concatenate(rows).astype(np.int64)
        padded = -(-self.lengths // block_size) * block_size
        self._dense = padded < min_sparse_tokens
        self._class_ids = length_classes(self.lengths, block_size)
        pairs = padded * (padded + 1.0) / 2
        row = np.repeat(np.arange(len(rows)), [len(lengths) for lengths in rows])
        # The density of a replica is the mean over its sequences, whatever their pair counts.
        weights = pairs / np.bincount(row, pairs)[row] / len(rows)
        self._sparse_weights = np.where(self._dense, 0.0, weights)
        self.sparse_weight = float(self._sparse_weights.sum())

    def densities(self, by_class: np.ndarray, factor: float = 1.0) -> np.ndarray:
        """Float64 [d]; sparse documents have their class density [K] at p0 times `factor`."""
        return np.where(self._dense, 1.0, np.minimum(by_class[self._class_ids] * factor, 1.0))

    def class_weights(self, by_class: np.ndarray) -> np.ndarray:
        """Float64 [K], the part of each class in the density at p0, of sparse documents only."""
        weights = self._sparse_weights * by_class[self._class_ids]
        return np.bincount(self._class_ids, weights, minlength=by_class.size)


@dataclasses.dataclass(frozen=True)
class DensityResponse:
    """The current estimate of densities; immutable."""

    assumed: np.ndarray  # float64 [K], densities at p0 by length class, before any measurement
    base: float  # p0
    level: np.ndarray  # float64 [K], ln of densities at p0 over the assumed ones
    # Float64 [L], moving averages over replicas: the covariance between the `reach` of fractions
    # and log densities, and the variance of that `reach`.
    covariance: np.ndarray
    variance: np.ndarray

    @classmethod
    def start(cls, assumed: np.ndarray, base: float, num_layers: int) -> Self:
        variance = np.full(num_layers, _START_VARIANCE)
        return cls(assumed, base, np.zeros(assumed.size), EXPONENT * variance, variance)

    @property
    def exponents(self) -> np.ndarray:
        return np.clip(self.covariance / self.variance, _LEAST, _MOST)

    @property
    def densities(self) -> np.ndarray:
        """Densities at p0 by class, float64 [K]."""
        return np.minimum(self.assumed * np.exp(self.level), 1.0)

    def growth(self, fractions: np.ndarray) -> np.ndarray:
        """Growth of the computed pairs of each layer, with fractions [..., L] instead of p0."""
        return np.exp((reach(fractions) - reach(self.base)) * self.exponents)

    def after(
        self, documents: Sequence[ReplicaDocuments], fractions: np.ndarray, measured: np.ndarray
    ) -> Self:
        """Returns the estimate after a step with these fractions and measured densities [M, L]."""
        sparse = sparse_densities(documents, measured)
        seen = np.isfinite(sparse).all(1)
        if not seen.any():
            return self
        weights = np.array([own.class_weights(self.densities) for own in documents])[seen]
        sparse_weight = np.array([own.sparse_weight for own in documents])[seen]
        expected = weights.sum(1) / sparse_weight
        fractions, sparse = fractions[seen], sparse[seen]
        # Differences between replicas, because layers and steps differ for other reasons.
        moved = reach(fractions)
        moved = moved - moved.mean(0)
        logs = np.log(sparse) - np.log(expected)[:, None]
        logs = logs - logs.mean(0)
        variance = (moved**2).mean(0)
        kept = np.where(variance > 0, _KEEP_SLOPE, 1.0)
        # Times over all layers follow the mean of their densities.
        at_base = (sparse / self.growth(fractions)).mean(1)
        error = np.log(at_base) - np.log(expected)
        total = weights.sum(0)
        by_class = (weights * error[:, None]).sum(0) / np.where(total > 0, total, 1.0)
        return dataclasses.replace(
            self,
            level=self.level + (1 - _KEEP_LEVEL) * by_class,
            covariance=kept * self.covariance + (1 - kept) * (moved * logs).mean(0),
            variance=kept * self.variance + (1 - kept) * variance,
        )

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name).tolist() for name in _FITTED}

    def with_state(self, state: dict[str, Any]) -> Self:
        """Restores the result of `state`; raises a UserError if sizes differ from these."""
        try:
            restored = {name: np.array(state[name], np.float64) for name in _FITTED}
        except (KeyError, TypeError, ValueError) as error:
            raise UserError("the checkpoint has no valid state of sparsity.tune") from error
        for name, value in restored.items():
            if value.shape != getattr(self, name).shape:
                raise UserError(
                    f"the checkpoint's state of sparsity.tune has {value.size} values of {name}, "
                    f"but this run needs {getattr(self, name).size}"
                )
        return dataclasses.replace(self, **restored)


def sparse_densities(documents: Sequence[ReplicaDocuments], measured: np.ndarray) -> np.ndarray:
    """Density [M, L] of the sparse documents given that of all; NaN for a replica without any."""
    weight = np.array([own.sparse_weight for own in documents])[:, None]
    known = weight > 1e-6
    densities = (measured - (1 - weight)) / np.where(known, weight, 1.0)
    return np.where(known & (densities > 0), densities, np.nan)
