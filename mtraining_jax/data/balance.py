"""Orders the sequences of a batch to balance the work of replicas, by measured densities."""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mtraining_jax.utils.errors import UserError

# Steps between a measurement and its use. The loader prefetches two batches, and a step is reported
# after the next one has started. A fixed delay makes the order of sequences deterministic.
DELAY = 4
# Decay of the moving average.
KEEP = 0.9


def length_classes(lengths: np.ndarray, block_size: int) -> np.ndarray:
    """The length class of documents of n > 0 tokens, int64: k for 2^k to 2^(k+1) - 1 blocks."""
    blocks = -(-np.asarray(lengths, np.int64) // block_size)
    return np.frexp(blocks.astype(np.float64))[1].astype(np.int64) - 1


def num_classes(num_blocks: int) -> int:
    """Number of length classes of documents of up to `num_blocks` blocks."""
    return num_blocks.bit_length()


class Repositioned(Exception):
    """The loader was repositioned or closed while a batch waited for a density."""


class Densities:
    """Thread-safe moving averages by length class of the last steps, from `start` [K]."""

    def __init__(self, start: np.ndarray) -> None:
        self._start = np.asarray(start, np.float64)
        self._changed = threading.Condition()
        self._after = {0: self._start}
        self.generation = 0  # how often the loader was repositioned or closed

    def before(self, step: int, generation: int | None = None) -> np.ndarray:
        """The averages [K] for the batch of a step: those after step - `DELAY`; waits for them."""
        with self._changed:
            generation = self.generation if generation is None else generation
            self._changed.wait_for(lambda: self.generation != generation or self.known_before(step))
            if self.generation != generation:
                raise Repositioned
            return self._after[max(step - DELAY, min(self._after))]

    def known_before(self, step: int) -> bool:
        """Whether `before` would return immediately."""
        with self._changed:
            return max(step - DELAY, min(self._after)) <= max(self._after)

    def add(self, step: int, measured: np.ndarray) -> None:
        """Adds the measurements of the next step, floats [K]; not finite if not measured."""
        with self._changed:
            newest = max(self._after)
            if step != newest + 1:
                raise ValueError(f"step {step} is added after step {newest}")
            old = self._after[newest]
            measured = np.asarray(measured, np.float64)
            seen = np.isfinite(measured)
            new = np.where(seen, KEEP * old + (1 - KEEP) * measured, old)
            kept = {at: x for at, x in self._after.items() if at >= step - 2 * DELAY}
            self._after = kept | {step: new}
            self._changed.notify_all()

    def state(self) -> dict[str, Any]:
        """JSON-serializable state: the averages after each of the last steps."""
        with self._changed:
            return {str(step): self._after[step].tolist() for step in sorted(self._after)}

    def go_to(self, step: int, state: dict[str, Any] | None) -> None:
        """Restores a state, or the initial values, such that the next batch is of `step` + 1."""
        after = {step: self._start}
        if state is not None:
            try:
                after = {int(at): np.array(x, np.float64) for at, x in state.items()}
            except (AttributeError, TypeError, ValueError) as error:
                raise UserError("the saved densities of the data are not readable") from error
            if not after or any(x.shape != self._start.shape for x in after.values()):
                raise UserError(
                    "the saved densities of the data do not have the expected number of length "
                    f"classes, {self._start.size}"
                )
        with self._changed:
            self._after = after
            self.close()

    def close(self) -> None:
        """Wakes all waiting threads."""
        with self._changed:
            self.generation += 1
            self._changed.notify_all()


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
