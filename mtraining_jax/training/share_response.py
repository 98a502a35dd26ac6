"""How density follows the share of mass that is kept, as finished steps have measured it.

A model of three parts: documents of a class of length have a density at the configured share p0;
documents that are kept whole have 1; and the density of all others grows by exp((p - p0) / s) with
the share p, where each layer has its own s. SparseBalance (arXiv 2604.13847) reads times from a
table of lengths and densities instead, which a profile fills; here each run fits its own data.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from mtraining_jax.data.densities import KEEP, length_classes
from mtraining_jax.errors import UserError

# Difference of shares between which pairs grow e-fold, before anything is measured.
_START = 0.05
_LEAST, _MOST = 0.005, 0.5  # between which it is believed
# The start counts as much as shares that differ between groups by their standard deviation 0.01.
_START_VARIANCE = 1e-4


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
        covariance: float64 [L], of shares and of the logs of densities, between groups.
        variance: float64 [L], of shares, between groups. Both are moving averages.
    """

    level: np.ndarray
    covariance: np.ndarray
    variance: np.ndarray

    @classmethod
    def start(cls, num_classes: int, num_layers: int) -> Self:
        """Before anything is measured."""
        variance = np.full(num_layers, _START_VARIANCE)
        return cls(np.zeros(num_classes), variance / _START, variance)

    @property
    def widths(self) -> np.ndarray:
        """s, float64 [L]: the difference of shares between which a layer's pairs grow e-fold."""
        slopes = self.covariance / self.variance
        return 1 / np.clip(slopes, 1 / _MOST, 1 / _LEAST)

    def densities(self, assumed: np.ndarray) -> np.ndarray:
        """Densities at p0 by class, float64 [K], from those assumed."""
        return np.minimum(assumed * np.exp(self.level), 1.0)

    def factor(self, shares: np.ndarray, base: float) -> np.ndarray:
        """What the pairs of all layers together grow by, at shares [..., L] in the place of p0."""
        return np.exp((shares - base) / self.widths).mean(-1)

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
        moved = shares - shares.mean(0)
        logs = np.log(chosen) - np.log(expected)[:, None]
        moved_logs = logs - logs.mean(0)
        variance = (moved**2).mean(0)
        told = variance > 0
        kept = np.where(told, KEEP, 1.0)
        # Times over all layers follow the mean of their densities.
        at_base = (chosen * np.exp((base - shares) / self.widths)).mean(1)
        error = np.log(at_base) - np.log(expected)
        weights = np.array([x.class_weights(known) for x in own])
        total = weights.sum(0)
        by_class = (weights * error[:, None]).sum(0) / np.where(total > 0, total, 1.0)
        return dataclasses.replace(
            self,
            level=self.level + (1 - KEEP) * by_class,
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
