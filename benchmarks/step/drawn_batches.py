"""Batches of drawn documents, assigned to data-parallel replicas, and their predicted times.

The order of packs and the averages of density come from the code of a run (`mtraining_jax.data`,
`mtraining_jax.training`). What a run knows before a step is kept apart from the densities that the
step then computes.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.step.drawn_lists import BLOCK, densities_by_length
from mtraining_jax.config import Config
from mtraining_jax.data.balance import Balance, Densities, imbalance, length_classes, num_classes
from mtraining_jax.data.packing.rules import chunked, packed_order
from mtraining_jax.tools.balance.replica_load import assumed_densities, attention_size
from mtraining_jax.tools.plan.cost import count_flops, seconds
from mtraining_jax.tools.plan.hardware import H200
from mtraining_jax.tools.plan.kernel_times import AttentionSize, documents_ms, pack_ms
from mtraining_jax.tools.plan.memory import estimate_memory
from mtraining_jax.utils.errors import UserError

MEANS = 1200, 65536  # tokens of short and long documents on average
START = 1.81  # imbalance where the table of SparseBalance begins (arXiv 2604.13847, table I)
WARM = 30  # batches before the counted ones, in which averages settle
ORDERS = ("none", "length", "density")
_TRIES = 400  # batches to select from


@dataclasses.dataclass(frozen=True)
class Pack:
    """A packed sequence: tokens of its documents, and the densities to compute; [d] each."""

    lengths: np.ndarray
    densities: np.ndarray

    def density(self) -> float:
        """Computed over causal pairs within documents."""
        return float(np.average(self.densities, weights=_causal_pairs(self.lengths)))


@dataclasses.dataclass(frozen=True)
class Run:
    """A run to balance.

    Attributes:
        config: of a single replica.
        replicas: M, number of replicas.
        packs: packs of a replica per step, one micro-batch each.
    """

    config: Config
    replicas: int
    packs: int

    @property
    def size(self) -> AttentionSize:
        """Sizes that determine the time of attention."""
        return attention_size(self.config)

    @functools.cached_property
    def rest_ms(self) -> float:
        """Time of a step outside attention, by the dry run."""
        parts = seconds(self.config, H200, estimate_memory(self.config), count_flops(self.config))
        return 1e3 * (sum(parts.values()) - parts["attention"])

    def split(self, batch: Sequence[Pack]) -> list[Sequence[Pack]]:
        """The packs of each replica."""
        return [batch[i : i + self.packs] for i in range(0, len(batch), self.packs)]

    def attention_ms(self, packs: Sequence[Pack]) -> float:
        """Attention time of some packs, by the table of rates."""
        return sum(documents_ms(x.lengths, x.densities, self.size).sum() for x in packs)


def draw_batches(
    run: Run, seed: int, count: int, start: float, means: Sequence[int]
) -> tuple[list[list[Pack]], list[list[Pack]]]:
    """Draws batches to learn averages from, and batches to time.

    Args:
        run: sizes of the batches.
        seed: of documents and densities.
        count: number of batches to time.
        start: their imbalance of attention in data order, within 0.05; 0 for any.
        means: tokens of short and long documents on average.

    Raises:
        UserError: if too few of the drawn batches have this imbalance.
    """
    rng, seq_len = np.random.default_rng(seed), run.config.data.seq_len
    size = run.replicas * run.packs
    table = densities_by_length(seed, seq_len, run.config.sparsity.pattern.min_sparse_tokens)
    tokens = int(1.02 * seq_len * size * (WARM + _TRIES))
    lengths = document_lengths(rng, tokens, seq_len, means)
    order, ends = packed_order(-(-lengths // BLOCK), seq_len // BLOCK, int(rng.integers(2**31)))
    rng.lognormal(size=lengths.shape)  # not used, but keeps the batches of the committed tables
    packs = []
    for own in np.split(lengths[order], ends[:-1]):
        # The device knows a document's density by its length. Documents that fill a pack end
        # somewhere in its last block, so that they differ in density.
        own = own - (own == seq_len) * rng.integers(0, BLOCK, own.shape)
        packs.append(Pack(own, table[own]))
    batches = [packs[i : i + size] for i in range(0, len(packs) - size + 1, size)]
    warm, others = batches[:WARM], batches[WARM : WARM + _TRIES]

    def starts_as_wanted(batch: Sequence[Pack]) -> bool:
        costs = np.array([run.attention_ms([pack]) for pack in batch])
        return not start or abs(imbalance(costs, run.replicas) - start) < 0.05

    found = list(filter(starts_as_wanted, others))
    if len(found) < count:
        raise UserError(
            f"--batches={count}: {len(found)} of {len(others)} drawn batches have an imbalance of "
            f"attention of {start} +- 0.05; ask for fewer, or change --start, --groups, --parts or "
            "--documents"
        )
    return warm, found[:count]


def document_lengths(
    rng: np.random.Generator, tokens: int, seq_len: int, means: Sequence[int]
) -> np.ndarray:
    """Lognormal lengths with equally many tokens for each mean, split every `seq_len` tokens."""
    lengths = [
        np.ceil(rng.lognormal(np.log(mean) - 1.1**2 / 2, 1.1, int(tokens / mean / len(means)) + 1))
        for mean in means
    ]
    lengths = rng.permutation(np.concatenate(lengths).astype(np.int64))
    return chunked(np.zeros_like(lengths), lengths, seq_len)[1]


def ordered(batches: Sequence[Sequence[Pack]], how: str, run: Run) -> Iterator[Sequence[Pack]]:
    """The batches in the order in which a run with `data.balance` = `how` would read them."""
    if how == "none":
        yield from batches
        return
    densities = Densities(assumed_densities(run.config)) if how == "density" else None
    cost = functools.partial(pack_ms, size=run.size)
    balance = Balance(how, run.replicas, run.packs, BLOCK, cost, densities)
    classes = num_classes(run.config.data.seq_len // BLOCK)
    for step, batch in enumerate(batches, 1):
        yield [batch[i] for i in balance.order(step, [pack.lengths for pack in batch])]
        if densities is not None:
            densities.add(step, _measured_densities(batch, classes))


def _measured_densities(batch: Sequence[Pack], classes: int) -> np.ndarray:
    """What a step reports: the density of all documents of each length class, [K]."""
    lengths = np.concatenate([pack.lengths for pack in batch])
    causal, class_of = _causal_pairs(lengths), length_classes(lengths, BLOCK)
    computed = causal * np.concatenate([pack.densities for pack in batch])
    sums = [np.bincount(class_of, x, minlength=classes) for x in (computed, causal)]
    return np.divide(*sums, out=np.full(classes, np.nan), where=sums[1] > 0)


def _causal_pairs(lengths: np.ndarray) -> np.ndarray:
    padded = -(-lengths // BLOCK) * BLOCK
    return padded * (padded + 1.0) / 2
