"""The shares of mass that let groups of devices end together: dynamic sparsity tuning.

After SparseBalance (arXiv 2604.13847): an anchor is the mean, least or greatest of the groups'
predicted times at the configured share; each group takes the share that brings it there, within
bounds of coverage. Where the lowest share is still too slow, the group takes that one.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from mtraining_jax.latency import AttentionSize, pack_ms
from mtraining_jax.sparsity.assumed_density import reach
from mtraining_jax.training.share_response import GroupDocuments, ShareResponse, share_at

_ANCHORS = {"mean": np.mean, "min": np.min, "max": np.max}
_HALVINGS = 30


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Between which shares are tuned.

    Attributes:
        base: p0, the configured share.
        low, high: bounds; low <= base <= high.
    """

    base: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class TunedShares:
    """Shares of a step.

    Attributes:
        shares: float64 [M, L].
        infeasible: bool [M], groups that the lowest share leaves slower than the anchor.
        untuned_ms: float64 [M], predicted times of attention at p0.
        tuned_ms: float64 [M], predicted times at these shares.
    """

    shares: np.ndarray
    infeasible: np.ndarray
    untuned_ms: np.ndarray
    tuned_ms: np.ndarray


def tuned_shares(
    documents: Sequence[GroupDocuments], response: ShareResponse, assumed: np.ndarray,
    bounds: Bounds, anchor: str, size: AttentionSize,
) -> TunedShares:
    """Shares for the groups of a step; the same on every process.

    Args:
        documents: of each group.
        response: what is believed of densities.
        assumed: float64 [K], densities at p0 by class, before anything is measured.
        bounds: of shares.
        anchor: "mean", "min" or "max".
        size: of the model.
    """
    known = response.densities(assumed)
    untuned = np.array([_ms(own, known, 1.0, size) for own in documents])
    target = float(_ANCHORS[anchor](untuned))
    found = [_of_group(own, response, known, bounds, target, size) for own in documents]
    shares, times, infeasible = (np.array(x) for x in zip(*found, strict=True))
    return TunedShares(shares, infeasible, untuned, times)


def _of_group(
    documents: GroupDocuments, response: ShareResponse, known: np.ndarray, bounds: Bounds,
    target: float, size: AttentionSize,
) -> tuple[np.ndarray, float, bool]:
    """Shares [L] of one group, its predicted time, and whether the lowest are still too slow."""
    exponents = response.exponents

    def at(growth: float) -> tuple[np.ndarray, float]:
        # ln of what the pairs of every layer grow by, as far as the bounds allow.
        shares = share_at(bounds.base, growth / exponents)
        shares = np.clip(shares, bounds.low, bounds.high)
        return shares, _ms(documents, known, float(response.factor(shares, bounds.base)), size)

    here, ms = at(0.0)
    if np.isclose(ms, target, rtol=1e-9, atol=0):
        return here, ms, False
    # A little further than any layer may go, so that rounding leaves none inside of its bound.
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


def _ms(
    documents: GroupDocuments, known: np.ndarray, factor: float, size: AttentionSize
) -> float:
    return pack_ms(documents.lengths, documents.densities(known, factor), size)
