"""How density follows the share of mass that is kept, as finished steps have measured it.

A model of three parts: documents of a class of length have a density at the configured share p0;
documents that are kept whole have 1; and the density of all others grows with the share p as a
power of 1 / (1.08 - p), where each layer has its own exponent. SparseBalance (arXiv 2604.13847)
reads times from a table of lengths and densities instead, which a profile fills; here each run fits
its own data.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from mtraining_jax.data.densities import length_classes
from mtraining_jax.errors import UserError
from mtraining_jax.sparsity.assumed_density import BEYOND, EXPONENT, reach

_LEAST, _MOST = 0.1, 10.0  # between which an exponent is believed
# The start counts as much as groups whose shares spread by 0.04 around 0.9.
_START_VARIANCE = 0.05
# Shares of averages that stay when a step is added: of densities, and of exponents. Groups with
# long documents keep smaller shares, so what is due to length must be learned before shares are
# blamed.
_KEEP_LEVEL, _KEEP_SLOPE = 0.8, 0.98


def share_at(base: float, further: np.ndarray) -> np.ndarray:
    """The shares whose `reach` lies further by these than that of a base; 0 gives the base."""
    return base + (BEYOND - base) * -np.expm1(-further)


class GroupDocuments:
    """The documents that one group has in a step.

    Attributes:
        lengths: int64 [d], real tokens.
        whole: bool [d], of which all pairs are kept.
        of_class: int64 [d], class of length.

    Args:
        rows: integers [d] for each sequence, tokens of its documents.
        block_size: g.
        dense_below: documents of fewer tokens, padding included, are kept whole.
    """

    def __init__(self, rows: Sequence[np.ndarray], block_size: int, dense_below: int) -> None:
        self.lengths = np.concatenate(rows).astype(np.int64)
        padded = -(-self.lengths // block_size) * block_size
        self.whole = padded < dense_below
        self.of_class = length_classes(self.lengths, block_size)
        pairs = padded * (padded + 1.0) / 2
        row = np.repeat(np.arange(len(rows)), [len(own) for own in rows])
        # A group's density is the mean over its sequences, whatever their pairs are.
        self._weights = pairs / np.bincount(row, pairs)[row] / len(rows)

    def densities(self, of_class: np.ndarray, factor: float = 1.0) -> np.ndarray:
        """Float64 [d], from those by class [K] at p0, times a factor where pairs are chosen."""
        return np.where(self.whole, 1.0, np.minimum(of_class[self.of_class] * factor, 1.0))

    @property
    def chosen_weight(self) -> float:
        """The weight in the group's density of documents of which pairs are chosen; at most 1."""
        return float(self._weights[~self.whole].sum())

    def chosen_density(self, of_class: np.ndarray) -> float:
        """The density of documents of which pairs are chosen, at p0."""
        return float((self._weights * of_class[self.of_class])[~self.whole].sum())

    def class_weights(self, of_class: np.ndarray) -> np.ndarray:
        """Float64 [K], the weight of each class in `chosen_density`."""
        weights = np.where(self.whole, 0.0, self._weights * of_class[self.of_class])
        return np.bincount(self.of_class, weights, minlength=of_class.size)


@dataclasses.dataclass(frozen=True)
class ShareResponse:
    """What is believed of densities; immutable.

    Attributes:
        level: float64 [K], ln of densities at p0 over those assumed, by class of length.
        covariance: float64 [L], of the `reach` of shares and the logs of densities, between groups.
        variance: float64 [L], of that `reach`, between groups. Both are moving averages.
    """

    level: np.ndarray
    covariance: np.ndarray
    variance: np.ndarray

    @classmethod
    def start(cls, num_classes: int, num_layers: int) -> Self:
        """Before anything is measured."""
        variance = np.full(num_layers, _START_VARIANCE)
        return cls(np.zeros(num_classes), EXPONENT * variance, variance)

    @property
    def exponents(self) -> np.ndarray:
        """Float64 [L], of each layer."""
        return np.clip(self.covariance / self.variance, _LEAST, _MOST)

    def densities(self, assumed: np.ndarray) -> np.ndarray:
        """Densities at p0 by class, float64 [K], from those assumed."""
        return np.minimum(assumed * np.exp(self.level), 1.0)

    def factor(self, shares: np.ndarray, base: float) -> np.ndarray:
        """What the pairs of all layers together grow by, at shares [..., L] in the place of p0."""
        return self._growth(shares, base).mean(-1)

    def _growth(self, shares: np.ndarray, base: float) -> np.ndarray:
        return np.exp((reach(shares) - reach(base)) * self.exponents)

    def chosen(self, documents: Sequence[GroupDocuments], measured: np.ndarray) -> np.ndarray:
        """Density [M, L] of the documents of which pairs are chosen, from that of all [M, L].

        NaN where a group has no such documents.
        """
        weight = np.array([own.chosen_weight for own in documents])[:, None]
        known = weight > 1e-6
        of_them = (measured - (1 - weight)) / np.where(known, weight, 1.0)
        return np.where(known & (of_them > 0), of_them, np.nan)

    def after(
        self, documents: Sequence[GroupDocuments], assumed: np.ndarray, shares: np.ndarray,
        base: float, measured: np.ndarray,
    ) -> Self:
        """What is believed after one more step.

        Args:
            documents: of each group.
            assumed: float64 [K], densities at p0 by class.
            shares: float64 [M, L], that were kept.
            base: p0.
            measured: floats [M, L], densities of groups, means over their sequences.
        """
        chosen = self.chosen(documents, np.asarray(measured, np.float64))
        seen = np.isfinite(chosen).all(1)
        if not seen.any():
            return self
        own = [documents[m] for m in np.flatnonzero(seen)]
        shares, chosen = shares[seen], chosen[seen]
        known = self.densities(assumed)
        weight = np.array([x.chosen_weight for x in own])
        expected = np.array([x.chosen_density(known) for x in own]) / weight
        # Of differences between groups, as layers and steps differ by themselves.
        moved = reach(shares)
        moved = moved - moved.mean(0)
        logs = np.log(chosen) - np.log(expected)[:, None]
        moved_logs = logs - logs.mean(0)
        variance = (moved**2).mean(0)
        told = variance > 0
        kept = np.where(told, _KEEP_SLOPE, 1.0)
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
        """A small dict that JSON can hold."""
        return {name: x.tolist() for name, x in dataclasses.asdict(self).items()}

    def of_state(self, state: dict[str, Any]) -> Self:
        """What `state` gave, of the same sizes as this one.

        Raises:
            UserError: it cannot be read.
        """
        try:
            found = {name: np.array(state[name], np.float64) for name in self.state()}
        except (KeyError, TypeError, ValueError) as error:
            raise UserError("the saved state of sparsity.tune is not readable") from error
        for name, value in found.items():
            if value.shape != getattr(self, name).shape:
                raise UserError(
                    f"the saved state of sparsity.tune has {value.size} numbers of {name}, and "
                    f"this run has {getattr(self, name).size}"
                )
        return type(self)(**found)
