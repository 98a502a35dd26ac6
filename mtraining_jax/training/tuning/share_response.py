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

from mtraining_jax.cost_model.density import BEYOND, EXPONENT, reach
from mtraining_jax.data.densities import length_classes
from mtraining_jax.utils.errors import UserError

_LEAST, _MOST = 0.1, 10.0  # limits of an exponent
# The prior has the weight of replicas with fractions that spread by 0.04 around 0.9.
_START_VARIANCE = 0.05
# Decay of the moving averages per step, of densities and of exponents. Replicas with long documents
# use lower fractions, so the effect of length must be fitted before that of the fraction.
_KEEP_LEVEL, _KEEP_SLOPE = 0.8, 0.98


def share_at(base: float, further: np.ndarray) -> np.ndarray:
    """Returns the fractions at distance `further` in `reach` from a base; 0 returns the base."""
    return base + (BEYOND - base) * -np.expm1(-further)


class GroupDocuments:
    """The documents of one data-parallel replica in a step.

    Documents with fewer tokens than `min_sparse_tokens`, including padding, use dense attention.

    Attributes:
        lengths: int64 [d], real tokens.
        whole: bool [d], documents with dense attention.
        of_class: int64 [d], length class.
    """

    def __init__(self, rows: Sequence[np.ndarray], block_size: int, min_sparse_tokens: int) -> None:
        self.lengths = np.concatenate(rows).astype(np.int64)
        padded = -(-self.lengths // block_size) * block_size
        self.whole = padded < min_sparse_tokens
        self.of_class = length_classes(self.lengths, block_size)
        pairs = padded * (padded + 1.0) / 2
        row = np.repeat(np.arange(len(rows)), [len(own) for own in rows])
        # The density of a replica is the mean over its sequences, whatever their pair counts.
        self._weights = pairs / np.bincount(row, pairs)[row] / len(rows)

    def densities(self, of_class: np.ndarray, factor: float = 1.0) -> np.ndarray:
        """Float64 [d]; sparse documents have their class density [K] at p0 times `factor`."""
        return np.where(self.whole, 1.0, np.minimum(of_class[self.of_class] * factor, 1.0))

    @property
    def chosen_weight(self) -> float:
        """The weight of sparse documents in the density of the replica; at most 1."""
        return float(self._weights[~self.whole].sum())

    def chosen_density(self, of_class: np.ndarray) -> float:
        """The weighted density of the sparse documents at p0."""
        return float((self._weights * of_class[self.of_class])[~self.whole].sum())

    def class_weights(self, of_class: np.ndarray) -> np.ndarray:
        """Float64 [K], the contribution of each class to `chosen_density`."""
        weights = np.where(self.whole, 0.0, self._weights * of_class[self.of_class])
        return np.bincount(self.of_class, weights, minlength=of_class.size)


@dataclasses.dataclass(frozen=True)
class ShareResponse:
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

    def factor(self, shares: np.ndarray, base: float) -> np.ndarray:
        """Growth of the computed pairs over all layers, with fractions [..., L] instead of p0."""
        return self._growth(shares, base).mean(-1)

    def _growth(self, shares: np.ndarray, base: float) -> np.ndarray:
        return np.exp((reach(shares) - reach(base)) * self.exponents)

    def chosen(self, documents: Sequence[GroupDocuments], measured: np.ndarray) -> np.ndarray:
        """Density [M, L] of the sparse documents, given that of all documents [M, L].

        NaN where a replica has no sparse documents.
        """
        weight = np.array([own.chosen_weight for own in documents])[:, None]
        known = weight > 1e-6
        of_them = (measured - (1 - weight)) / np.where(known, weight, 1.0)
        return np.where(known & (of_them > 0), of_them, np.nan)

    def after(
        self,
        documents: Sequence[GroupDocuments],
        assumed: np.ndarray,
        shares: np.ndarray,
        base: float,
        measured: np.ndarray,
    ) -> Self:
        """Returns the estimate after one more step.

        Args:
            documents: documents of each replica.
            assumed: float64 [K], densities at p0 by class.
            shares: float64 [M, L], the mass fractions of the step.
            base: p0.
            measured: floats [M, L], densities of replicas, means over their sequences.
        """
        chosen = self.chosen(documents, np.asarray(measured, np.float64))
        seen = np.isfinite(chosen).all(1)
        if not seen.any():
            return self
        own = [documents[m] for m in np.flatnonzero(seen).tolist()]
        shares, chosen = shares[seen], chosen[seen]
        known = self.densities(assumed)
        weight = np.array([x.chosen_weight for x in own])
        expected = np.array([x.chosen_density(known) for x in own]) / weight
        # Differences between replicas, because layers and steps differ for other reasons.
        moved = reach(shares)
        moved = moved - moved.mean(0)
        logs = np.log(chosen) - np.log(expected)[:, None]
        moved_logs = logs - logs.mean(0)
        variance = (moved**2).mean(0)
        varies = variance > 0
        kept = np.where(varies, _KEEP_SLOPE, 1.0)
        # Times over all layers follow the mean of their densities.
        at_base = (chosen / self._growth(shares, base)).mean(1)
        error = np.log(at_base) - np.log(expected)
        weights = np.array([x.class_weights(known) for x in own])
        total = weights.sum(0)
        by_class = (weights * error[:, None]).sum(0) / np.where(total > 0, total, 1.0)
        return dataclasses.replace(
            self,
            level=self.level + (1 - _KEEP_LEVEL) * by_class,
            covariance=kept * self.covariance + (1 - kept) * (moved * moved_logs).mean(0),
            variance=kept * self.variance + (1 - kept) * variance,
        )

    def state(self) -> dict[str, Any]:
        """Returns a small JSON-serializable dict."""
        return {name: x.tolist() for name, x in dataclasses.asdict(self).items()}

    def of_state(self, state: dict[str, Any]) -> Self:
        """Restores the result of `state`; raises a UserError if sizes differ from these."""
        try:
            found = {name: np.array(state[name], np.float64) for name in self.state()}
        except (KeyError, TypeError, ValueError) as error:
            raise UserError("the checkpoint has no valid state of sparsity.tune") from error
        for name, value in found.items():
            if value.shape != getattr(self, name).shape:
                raise UserError(
                    f"the checkpoint's state of sparsity.tune has {value.size} values of {name}, "
                    f"but this run needs {getattr(self, name).size}"
                )
        return type(self)(**found)
