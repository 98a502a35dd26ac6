"""Which rows of a batch its sequences take, so that groups of devices have as much work each."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from mtraining_jax.data.densities import Densities, length_classes

# Predicted time of a sequence from the tokens of its documents and their densities.
Weigh = Callable[[np.ndarray, np.ndarray], float]


def even_order(weights: np.ndarray, groups: int, parts: int = 1) -> np.ndarray:
    """Deals sequences to groups: the heaviest first, each to the lightest group that has room.

    All groups get equally many. Within a group the heaviest come first, so that micro-batches that
    groups compute at the same time are alike too. An order that is as even already stays.

    Args:
        weights: floats [B] above 0, in the order of the data.
        groups: M; they take consecutive rows of the batch.
        parts: micro-batches of a group, which take consecutive rows of its own. M * parts divides
            B.

    Returns:
        int64 [B]: the number of the sequence that each row takes.
    """
    weights = np.asarray(weights, np.float64)
    room, odd = divmod(weights.size, groups)
    if odd or room % parts:
        raise ValueError(f"{weights.size} sequences for {groups} groups of {parts} parts")
    members: list[list[int]] = [[] for _ in range(groups)]
    loads = np.zeros(groups)
    for number in np.argsort(-weights, kind="stable").tolist():
        # Full groups are no choice; of equal loads the first group.
        group = int(np.argmin(loads))
        members[group].append(number)
        loads[group] += weights[number]
        if len(members[group]) == room:
            loads[group] = np.inf
    order = np.array(members, np.int64).reshape(-1)
    if imbalance(weights, groups) <= imbalance(weights[order], groups):
        return np.arange(weights.size)
    return order


def imbalance(weights: np.ndarray, groups: int) -> float:
    """The heaviest group over the mean of all; groups take consecutive weights, [B] in all."""
    loads = np.asarray(weights, np.float64).reshape(groups, -1).sum(1)
    return float(loads.max() / loads.mean())


@dataclasses.dataclass(frozen=True)
class Balance:
    """How the sequences of each global batch are dealt to groups; the same on every process.

    Attributes:
        name: of the way, as `data.balance` has it.
        groups: of devices that each work on other sequences.
        parts: micro-batches of a group.
        block_size: g, tokens of a block.
        weigh: predicted time of a sequence.
        densities: of documents by their length, as last measured; None takes all to be dense.
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
        """The sequence that each row of a batch takes; see `even_order`.

        Args:
            step: the batch's, from 1; waits for the densities that it needs.
            lengths: integers [d] for each sequence of the batch, tokens of its documents.
            place: as of `Densities.before`.

        Returns:
            int64 [B].
        """
        known = None if self.densities is None else self.densities.before(step, place)
        weights = [weight(own, known, self.weigh, self.block_size) for own in lengths]
        return even_order(np.array(weights), self.groups, self.parts)


def weight(
    lengths: np.ndarray, densities: np.ndarray | None, weigh: Weigh, block_size: int
) -> float:
    """The predicted time of a sequence.

    Args:
        lengths: integers [d], tokens of its documents.
        densities: floats [K] by class of length; None takes all to be dense.
        weigh: of the model.
        block_size: g.
    """
    if densities is None:
        return weigh(lengths, np.ones(lengths.shape))
    return weigh(lengths, densities[length_classes(lengths, block_size)])
