"""Orders the sequences of a batch to balance work between data-parallel replicas."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from mtraining_jax.data.densities import Densities, length_classes

# Predicts the time of a sequence from the lengths and densities of its documents.
Weigh = Callable[[np.ndarray, np.ndarray], float]


def even_order(weights: np.ndarray, groups: int, parts: int = 1) -> np.ndarray:
    """Greedy balancing: assigns the most expensive sequences first, to the least loaded replica.

    All replicas get equally many sequences, the most expensive ones first, so that micro-batches
    computed at the same time are balanced too. Keeps the order if it is already as balanced.

    Args:
        weights: cost of each sequence, floats [B] above 0.
        groups: number of replicas; each takes consecutive rows of the batch.
        parts: micro-batches per replica, consecutive rows as well. groups * parts divides B.

    Returns:
        int64 [B]: the index of the sequence for each row.
    """
    weights = np.asarray(weights, np.float64)
    room, odd = divmod(weights.size, groups)
    if odd or room % parts:
        raise ValueError(f"{weights.size} sequences for {groups} replicas x {parts} micro-batches")
    members: list[list[int]] = [[] for _ in range(groups)]
    loads = np.zeros(groups)
    for number in np.argsort(-weights, kind="stable").tolist():
        group = int(np.argmin(loads))  # full replicas have infinite load
        members[group].append(number)
        loads[group] += weights[number]
        if len(members[group]) == room:
            loads[group] = np.inf
    order = np.array(members, np.int64).reshape(-1)
    if imbalance(weights, groups) <= imbalance(weights[order], groups):
        return np.arange(weights.size)
    return order


def imbalance(weights: np.ndarray, groups: int) -> float:
    """Maximum over mean load of replicas, which take consecutive entries of the weights [B]."""
    loads = np.asarray(weights, np.float64).reshape(groups, -1).sum(1)
    return float(loads.max() / loads.mean())


@dataclasses.dataclass(frozen=True)
class Balance:
    """Assigns the sequences of global batches to replicas, identically on all processes.

    Without `densities`, measured by document length, it assumes dense attention.
    """

    name: str
    groups: int
    parts: int
    block_size: int
    weigh: Weigh
    densities: Densities | None = None

    def order(
        self, step: int, lengths: Sequence[np.ndarray], place: int | None = None
    ) -> np.ndarray:
        """The index of the sequence for each row of a batch, int64 [B]; see `even_order`.

        Waits for the densities that the batch of this step, from 1, requires.
        """
        known = None if self.densities is None else self.densities.before(step, place)
        weights = [weight(own, known, self.weigh, self.block_size) for own in lengths]
        return even_order(np.array(weights), self.groups, self.parts)


def weight(
    lengths: np.ndarray, densities: np.ndarray | None, weigh: Weigh, block_size: int
) -> float:
    """The predicted time of a sequence of documents of `lengths` tokens.

    `densities`, floats [K] by length class; None assumes dense attention.
    """
    if densities is None:
        return weigh(lengths, np.ones(lengths.shape))
    return weigh(lengths, densities[length_classes(lengths, block_size)])
