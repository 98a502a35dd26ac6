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

from mtraining_jax.cost_model.density import EXPONENT, reach
from mtraining_jax.data.densities import length_classes
from mtraining_jax.utils.errors import UserError

_LEAST, _MOST = 0.1, 10.0  # limits of an exponent
# The prior has the weight of replicas with fractions that spread by 0.04 around 0.9.
_START_VARIANCE = 0.05
# Decay of the moving averages per step, of densities and of exponents. Replicas with long documents
# use lower fractions, so the effect of length must be fitted before that of the fraction.
_KEEP_LEVEL, _KEEP_SLOPE = 0.8, 0.98


class ReplicaDocuments:
    """The documents of one data-parallel replica in a step.

    Documents with fewer tokens than `min_sparse_tokens`, including padding, use dense attention.

    Attributes:
        lengths: int64 [d], real tokens.
        sparse_weight: weight of sparse documents in the density of the replica; at most 1.
    """

    def __init__(self, rows: Sequence[np.ndarray], block_size: int, min_sparse_tokens: int) -> None:
        self.lengths = np.concatenate(rows).astype(np.int64)
        padded = -(-self.lengths // block_size) * block_size
        self._dense = padded < min_sparse_tokens
        self._class_ids = length_classes(self.lengths, block_size)
        pairs = padded * (padded + 1.0) / 2
        row = np.repeat(np.arange(len(rows)), [len(of_row) for of_row in rows])
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
    """The current estimate of densities; immutable.

    Attributes:
        level: float64 [K], ln of densities at p0 over the assumed ones, by length class.
        covariance: float64 [L], between the `reach` of fractions and log densities, over replicas.
        variance: float64 [L], of that `reach`, over replicas. Both are moving averages.
    """

    level: np.ndarray
    covariance: np.ndarray
    variance: np.ndarray

    @classmethod
    def start(cls, num_classes: int, num_layers: int) -> Self:
        """Returns the prior, before any measurement."""
        variance = np.full(num_layers, _START_VARIANCE)
        return cls(np.zeros(num_classes), EXPONENT * variance, variance)

    @property
    def exponents(self) -> np.ndarray:
        """Float64 [L], one per layer."""
        return np.clip(self.covariance / self.variance, _LEAST, _MOST)

    def densities(self, assumed: np.ndarray) -> np.ndarray:
        """Densities at p0 by class, float64 [K], given the assumed ones."""
        return np.minimum(assumed * np.exp(self.level), 1.0)

    def growth(self, fractions: np.ndarray, base: float) -> np.ndarray:
        """Growth of the computed pairs of each layer, with fractions [..., L] instead of p0."""
        return np.exp((reach(fractions) - reach(base)) * self.exponents)

    def after(
        self,
        documents: Sequence[ReplicaDocuments],
        assumed: np.ndarray,
        fractions: np.ndarray,
        base: float,
        measured: np.ndarray,
    ) -> Self:
        """Returns the estimate after one more step.

        Args:
            documents: documents of each replica.
            assumed: float64 [K], densities at p0 by class.
            fractions: float64 [M, L], the mass fractions of the step.
            base: p0.
            measured: floats [M, L], densities of replicas, means over their sequences.
        """
        sparse = sparse_densities(documents, measured)
        seen = np.isfinite(sparse).all(1)
        if not seen.any():
            return self
        weights = np.array([own.class_weights(self.densities(assumed)) for own in documents])[seen]
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
        at_base = (sparse / self.growth(fractions, base)).mean(1)
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
        """Returns a small JSON-serializable dict."""
        return {name: x.tolist() for name, x in dataclasses.asdict(self).items()}

    def of_state(self, state: dict[str, Any]) -> Self:
        """Restores the result of `state`; raises a UserError if sizes differ from these."""
        try:
            restored = {name: np.array(state[name], np.float64) for name in self.state()}
        except (KeyError, TypeError, ValueError) as error:
            raise UserError("the checkpoint has no valid state of sparsity.tune") from error
        for name, value in restored.items():
            if value.shape != getattr(self, name).shape:
                raise UserError(
                    f"the checkpoint's state of sparsity.tune has {value.size} values of {name}, "
                    f"but this run needs {getattr(self, name).size}"
                )
        return type(self)(**restored)


def sparse_densities(documents: Sequence[ReplicaDocuments], measured: np.ndarray) -> np.ndarray:
    """Density [M, L] of the sparse documents, given that of all documents [M, L].

    NaN where a replica has no sparse documents.
    """
    weight = np.array([own.sparse_weight for own in documents])[:, None]
    known = weight > 1e-6
    densities = (measured - (1 - weight)) / np.where(known, weight, 1.0)
    return np.where(known & (densities > 0), densities, np.nan)
