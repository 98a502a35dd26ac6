"""Orders the sequences of a batch to balance work between data-parallel replicas."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from mtraining_jax.data.densities import Densities, length_classes

# Predicts the time of a sequence from the lengths and densities of its documents.
CostFn = Callable[[np.ndarray, np.ndarray], float]


def even_order(costs: np.ndarray, replicas: int, parts: int = 1) -> np.ndarray:
    """Greedy balancing: assigns the most expensive sequences first, to the least loaded replica.

    Maps costs, floats [B] above 0, to the index of the sequence for each row, int64 [B]. Replicas
    take equally many consecutive rows, the most expensive ones first, so that micro-batches
    (`parts`) computed at the same time are balanced too. Keeps an order that is as balanced.
    """
    costs = np.asarray(costs, np.float64)
    room, odd = divmod(costs.size, replicas)
    if odd or room % parts:
        raise ValueError(f"{costs.size} sequences for {replicas} replicas x {parts} micro-batches")
    members: list[list[int]] = [[] for _ in range(replicas)]
    loads = np.zeros(replicas)
    for sequence in np.argsort(-costs, kind="stable").tolist():
        replica = int(np.argmin(loads))  # full replicas have infinite load
        members[replica].append(sequence)
        loads[replica] += costs[sequence]
        if len(members[replica]) == room:
            loads[replica] = np.inf
    order = np.array(members, np.int64).reshape(-1)
    if imbalance(costs, replicas) <= imbalance(costs[order], replicas):
        return np.arange(costs.size)
    return order


def imbalance(costs: np.ndarray, replicas: int) -> float:
    """Maximum over mean load of replicas, which take consecutive entries of the costs [B]."""
    loads = np.asarray(costs, np.float64).reshape(replicas, -1).sum(1)
    return float(loads.max() / loads.mean())


@dataclasses.dataclass(frozen=True)
class Balance:
    """Assigns the sequences of global batches to replicas, identically on all processes."""

    name: str
    replicas: int
    parts: int
    block_size: int
    cost: CostFn
    densities: Densities | None = None  # measured by document length; None assumes dense attention

    def order(
        self, step: int, lengths: Sequence[np.ndarray], generation: int | None = None
    ) -> np.ndarray:
        """See `even_order`; waits for the densities that the batch of a step, from 1, requires."""
        known = None if self.densities is None else self.densities.before(step, generation)
        costs = [sequence_cost(pack, known, self.cost, self.block_size) for pack in lengths]
        return even_order(np.array(costs), self.replicas, self.parts)


def sequence_cost(
    lengths: np.ndarray, densities: np.ndarray | None, cost: CostFn, block_size: int
) -> float:
    """The predicted time of a sequence of documents; `densities` [K] by length class, or dense."""
    if densities is None:
        return cost(lengths, np.ones(lengths.shape))
    return cost(lengths, densities[length_classes(lengths, block_size)])
