"""Steps whose packs are dealt to groups: batches as drawn, their orders, what a step takes."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from benchmarks.step import balance
from benchmarks.step.balance import Pack, Setting
from benchmarks.step.drawn_lists import densities_by_length
from mtraining_jax.data.balance import imbalance
from mtraining_jax.errors import UserError

ORDERS = ("none", "length", "density", balance.TUNED)
_TRIES = 400  # batches that are drawn to find some


@dataclasses.dataclass(frozen=True)
class Dealt:
    """A step whose packs were dealt to its groups.

    Attributes:
        groups: the packs of each group, with the densities that they are to compute.
        shares: float64 [M, L], the share of mass that each group keeps in each layer.
    """

    groups: list[list[Pack]]
    shares: np.ndarray


@dataclasses.dataclass(frozen=True)
class Times:
    """Of the groups of one step, each by itself.

    Attributes:
        attention_ms: float64 [M], attention alone, forward and backward, in all layers.
        step_ms: float64 [M], the whole step.
        density: computed over causal pairs within documents, mean over packs.
    """

    attention_ms: np.ndarray
    step_ms: np.ndarray
    density: float


@dataclasses.dataclass(frozen=True)
class Found:
    """What a step is that waits for its slowest group: means over steps.

    Attributes:
        attention, step: imbalance: the busiest group over the mean of all.
        attention_ms, step_ms: of the busiest group.
        rest_ms: of a step but its attention, mean over groups.
        density: computed over causal pairs within documents.
    """

    attention: float
    step: float
    attention_ms: float
    step_ms: float
    rest_ms: float
    density: float

    @classmethod
    def of(cls, times: Times) -> "Found":
        """One step."""
        groups = times.step_ms.size
        return cls(
            attention=imbalance(times.attention_ms, groups),
            step=imbalance(times.step_ms, groups),
            attention_ms=float(times.attention_ms.max()),
            step_ms=float(times.step_ms.max()),
            rest_ms=float((times.step_ms - times.attention_ms).mean()),
            density=times.density,
        )

    @classmethod
    def mean(cls, found: "Sequence[Found]") -> "Found":
        """Several steps."""
        return cls(*np.mean([dataclasses.astuple(each) for each in found], axis=0).tolist())


def chosen_batches(
    run: Setting, seed: int, count: int, start: float, means: Sequence[int]
) -> tuple[list[Sequence[Pack]], list[Sequence[Pack]]]:
    """Batches from which averages are learned, and those to run.

    Args:
        run: it.
        seed: of documents and densities.
        count: of batches to run.
        start: imbalance of attention that these have in the order of the data, within 0.05.
        means: tokens of short and of long documents.

    Raises:
        UserError: not enough of the batches that are drawn start there.
    """
    rng, seq_len = np.random.default_rng(seed), run.config.data.seq_len
    table = densities_by_length(seed, seq_len, run.dense_below)

    def known(pack: Pack) -> Pack:
        # The device knows a document's density by its length. So those that fill a pack end
        # somewhere in their last block, and do not all have one density.
        full = pack.lengths == seq_len
        lengths = pack.lengths - full * rng.integers(0, balance.BLOCK, pack.lengths.shape)
        return Pack(lengths, table[lengths])

    drawn = balance.drawn(rng, run, balance.WARM + _TRIES, means)
    drawn = [[known(pack) for pack in batch] for batch in drawn]
    warm, others = drawn[: balance.WARM], drawn[balance.WARM :]
    found = balance.starting_at(others, run, start)
    if len(found) < count:
        raise UserError(
            f"--batches={count}: {len(found)} of {len(others)} drawn batches begin at an imbalance "
            f"of attention of {start} +- 0.05, and no more may be asked for; another --start, "
            "--groups, --parts or --documents would do"
        )
    return warm, found[:count]


def dealt_batches(
    warm: Sequence[Sequence[Pack]], batches: Sequence[Sequence[Pack]], run: Setting
) -> dict[str, list[Dealt]]:
    """Each batch in each of `ORDERS`, as a run has it that took the steps of `warm` before."""
    every = [*warm, *batches]
    tuning = balance.Tuning(run, np.random.default_rng(0), spread=0.0)
    orders = {how: list(balance.dealt(every, how, run)) for how in ORDERS[:-1]}
    orders[balance.TUNED] = list(tuning.apply(orders["length"]))
    configured = np.full((run.groups, run.config.model.num_layers), balance.BOUNDS.base)
    shares = {how: [configured] * len(every) for how in orders} | {balance.TUNED: tuning.kept}
    return {
        how: [
            Dealt([batch[m : m + run.parts] for m in range(0, len(batch), run.parts)], kept)
            for batch, kept in zip(steps[len(warm) :], shares[how][len(warm) :], strict=True)
        ]
        for how, steps in orders.items()
    }


def predicted(dealt: Dealt, run: Setting) -> Times:
    """By the table of rates and the dry run, with the densities that are to be computed."""
    attention = np.array([balance.times(packs, run.size).sum() for packs in dealt.groups])
    density = np.mean([_density(pack) for packs in dealt.groups for pack in packs])
    return Times(attention, attention + run.rest_ms, float(density))


def _density(pack: Pack) -> float:
    padded = -(-pack.lengths // balance.BLOCK) * balance.BLOCK
    return float(np.average(pack.densities, weights=padded * (padded + 1.0)))
