"""Replayed density: random indices of a given density, for speed measurements.

With random weights attention is nearly uniform and top-p keeps everything, so a step says nothing
about the speed of a trained model. A replay computes as many pairs as a trained model would, on
random block diagonals and columns, or on random block lists (`replay_lists.py`). It does not select
what matters.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np

from mtraining_jax.patterns.base import ModelSizes, Pattern
from mtraining_jax.patterns.replay_lists import estimated, make_replay_lists
from mtraining_jax.patterns.vertical_slash import VerticalSlash, VerticalSlashSettings
from mtraining_jax.selection.context import Selection, SelectionContext
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.limits import (
    Ge,
    Gt,
    Le,
    Lt,
    NonNegativeInt,
    PositiveFraction,
    PositiveInt,
    UnitFraction,
)

if TYPE_CHECKING:
    from jax import Array

# Sparsity per layer as measured by arXiv 2510.18830 at 512K tokens: mean 93.7 %, lowest 87.3 %,
# highest 99.6 %. The assignment to layers is not reported.
_MEAN, _LOWEST_LAYER, _HIGHEST_LAYER = 0.063, 0.004, 0.127
# Heads of a layer are spread evenly over this range, times the density of the layer.
_LOWEST_HEAD, _HIGHEST_HEAD = 0.5, 1.5
# Mask B of the benchmarks: block diagonals 0..7 and distant ones, 6 % in total, and 3000 columns.
_NEAR = 8
_COLUMNS_AT_MEAN = 3000
# Columns compute at most this fraction of a head's pairs. Mask B has 24 % at 131072 tokens.
_MOST_IN_COLUMNS = 0.25
# The nearest diagonals take at most this fraction, so that every head has distant ones.
_MOST_NEAR = 0.5


_DENSITY_NAME = "replayed density, not chosen"


@dataclasses.dataclass(frozen=True)
class ReplaySettings(VerticalSlashSettings):
    """A density to replay; the other fields configure the estimate that runs with it.

    With documents, the pairs drawn for the whole sequence are restricted to its documents. Their
    density within a document is therefore that of a window of its length, which is higher for
    short documents. The actual density is reported.

    Attributes:
        replay_of: Pattern to replay: block diagonals and columns of vertical_slash, or random
            lists per row of blocks of one of the others. With `replay_estimate` this pattern also
            selects.
        replay_density: Density to replay, mean over layers. Layers spread from 0.06 to 2 times
            this value, as in the MTraining paper: 0.4 % to 12.7 % around 6.3 %.
        replay_estimate: Also select an index in every layer, so that a step includes selection
            cost.
        tau, sink_blocks, min_block_mass, dense_prefix_tokens, dense_suffix_tokens: As in the replayed list pattern.
        random_block_prob, min_sparse_tokens, stride, probe_queries_per_block, columns: As in the replayed list pattern.
    """

    reads_documents = True
    selects = False
    density_name = _DENSITY_NAME

    replay_of: Literal["vertical_slash", "xattention", "sampled_rows"] = "vertical_slash"
    replay_density: Annotated[float, Gt(0), Le(0.3)] = 0.063
    replay_estimate: bool = True
    tau: PositiveFraction = 0.9
    sink_blocks: NonNegativeInt = 1
    min_block_mass: UnitFraction = 0.0
    dense_prefix_tokens: NonNegativeInt = 0
    dense_suffix_tokens: NonNegativeInt | None = None
    random_block_prob: Annotated[float, Ge(0), Lt(1)] = 0.0
    min_sparse_tokens: NonNegativeInt = 8192
    stride: PositiveInt = 8
    probe_queries_per_block: PositiveInt = 16
    columns: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._like()  # validates the fields of the replayed pattern

    def row_sharded(self, documents: bool) -> bool:
        return self._lists or documents

    @property
    def _lists(self) -> bool:
        return self.replay_of != "vertical_slash"

    def _like(self) -> Pattern:
        """Returns the replayed pattern, with its fields from these settings."""
        from mtraining_jax.patterns.registry import PATTERNS

        cls = PATTERNS.get(self.replay_of)
        return cls(**{field.name: getattr(self, field.name) for field in dataclasses.fields(cls)})

    def pattern(self, model: ModelSizes) -> Pattern:
        """Draws the indices of all layers with the run's seed.

        Raises:
            UserError: if the density cannot be replayed with these settings.
        """
        if self._lists:
            return make_replay_lists(
                _targets(
                    np.random.default_rng(model.seed),
                    self.replay_density,
                    model.num_layers,
                    model.num_heads,
                ),
                num_blocks=model.seq_len // self.block_size,
                block_size=self.block_size,
                sink_blocks=self.sink_blocks,
                local_blocks=self.local_blocks,
                estimate=self._like() if self.replay_estimate else None,
                seed=model.seed,
            )
        like = self._like()
        assert isinstance(like, VerticalSlash)
        return make_replay(
            density=self.replay_density,
            num_layers=model.num_layers,
            num_heads=model.num_heads,
            seq_len=model.seq_len,
            like=like,
            estimate=self.replay_estimate,
            seed=model.seed,
        )

    def describe(self) -> str:
        also = ", plus selection cost" if self.replay_estimate else ""
        what = "lists for each row of blocks" if self._lists else "block diagonals and columns"
        return (
            f"{_DENSITY_NAME}: {self.replay_density:.1%} of the causal pairs, random {what}{also}"
        )

    def takes_selection(self) -> bool:
        return self.replay_estimate

    def scoring_share(self) -> float:
        return self._like().scoring_share() if self.replay_estimate else 0.0

    def softmax_share(self) -> float:
        return self._like().softmax_share() if self.replay_estimate else 0.0

    def capacities(self, num_blocks: int, documents: bool = False) -> tuple[int, int]:
        return self._like().capacities(num_blocks, documents)

    def expected_density(self, tokens: int) -> tuple[float, str]:
        return self.replay_density, _DENSITY_NAME


@dataclasses.dataclass(frozen=True)
class Replay(Pattern):
    """A fixed index for every head, the same for all batches; a pytree.

    Layers can be stacked, each array with a leading axis [L], and scanned over.

    Attributes:
        slash_blocks: int32 [Hq, max_slash_blocks], as in `VerticalSlashIndex`, like the next three.
        slash_count: int32 [Hq].
        vertical_tokens: int32 [Hq, max_verticals].
        vertical_count: int32 [Hq].
        estimate: pattern that selects an index before the replayed one is used, so that a step
            includes selection cost; None to skip.
        block_size: g, tokens per block.
    """

    arrays = ("slash_blocks", "slash_count", "vertical_tokens", "vertical_count")
    reads_documents = True
    selects = False
    density_name = _DENSITY_NAME

    slash_blocks: "Array | np.ndarray"
    slash_count: "Array | np.ndarray"
    vertical_tokens: "Array | np.ndarray"
    vertical_count: "Array | np.ndarray"
    estimate: Pattern | None
    block_size: int

    def row_sharded(self, documents: bool) -> bool:
        return documents

    def select(self, q: "Array", k: "Array", context: SelectionContext) -> Selection:
        """Returns the replayed index, and the density of the one selected by `estimate`.

        The replayed index depends on the selected one, in a way that changes none of its values and
        that no compiler can remove. Attention therefore starts after the selection, as if the
        selection were used.
        """
        if context.documents is not None:
            return self._choose_for_documents(q, k, context)
        import jax
        import jax.numpy as jnp

        from pallas_kernels.index import VerticalSlashIndex

        shape = (q.shape[0], *self.slash_count.shape)
        statistics, none = {}, jnp.zeros(shape, jnp.int32)
        if self.estimate is not None:
            selected, statistics = estimated(self.estimate, q, k, context)
            # All entries of an index are at least 0, which the compiler does not know.
            lowest = (_lowest(x, shape) for x in jax.tree.leaves(selected))
            none = jnp.minimum(functools.reduce(jnp.minimum, lowest), 0)

        def replayed(x: "Array") -> "Array":
            x = jnp.broadcast_to(x, (shape[0], *x.shape))
            return x + none.reshape(*shape, *[1] * (x.ndim - 2))

        leaves = (replayed(getattr(self, name)) for name in self.arrays)
        return Selection(VerticalSlashIndex(*leaves, block_size=self.block_size), statistics)

    def _choose_for_documents(self, q: "Array", k: "Array", context: SelectionContext) -> Selection:
        """Returns the same pairs, restricted to documents, as bits and marked columns."""
        import jax.numpy as jnp

        from pallas_kernels.index import BlockMaskIndex, VerticalSlashIndex

        rows, num_blocks, documents = context.block_ids, context.num_blocks, context.documents
        assert documents is not None
        statistics, never = {}, jnp.zeros((q.shape[0], q.shape[2]), bool)
        if self.estimate is not None:
            selected, statistics = estimated(self.estimate, q, k, context)
            # A count is at least 0, which the compiler does not know.
            never = selected.budgets()["blocks"] < 0
        leaves = (getattr(self, name)[None] for name in self.arrays)
        drawn = VerticalSlashIndex(*leaves, block_size=self.block_size)
        diagonals = drawn.active_diagonals(num_blocks)  # [1, Hq, NB]
        distance = rows[:, None] - jnp.arange(num_blocks, dtype=jnp.int32)
        listed = diagonals[:, :, jnp.maximum(distance, 0)] ^ never[:, :, None, None]
        index = BlockMaskIndex.from_block_mask(listed, self.block_size, rows)
        if drawn.vertical_tokens.shape[-1]:
            tokens = jnp.broadcast_to(
                drawn.vertical_tokens, (q.shape[0], *drawn.vertical_tokens.shape[1:])
            )
            index = index.with_columns(tokens, rows)
        return Selection(index.within_documents(*documents.spans(), rows), statistics)


def _lowest(x: "Array", shape: tuple[int, ...]) -> "Array":
    """Returns the minimum per batch entry and head of an array [B, Hq, ...]: [B, Hq]."""
    return x.reshape(*shape, -1).min(-1, initial=0)


def layer_densities(num_layers: int, mean: float) -> np.ndarray:
    """Returns the densities of a model's layers, ascending: fp64 [L].

    Their mean is `mean`. From three layers on, the lowest and highest are those of the paper times
    mean / 6.3 %. Those between are not reported; here they follow a power of evenly spaced steps.
    """
    if num_layers == 1:
        return np.array([mean])
    low, high = _LOWEST_LAYER / _MEAN, _HIGHEST_LAYER / _MEAN
    places = np.linspace(0, 1, num_layers)
    few, many = 0.1, 10.0  # bounds of the exponent; a higher one gives a lower mean
    for _ in range(60):
        power = (few + many) / 2
        if (low + (high - low) * places**power).mean() > 1:
            few = power
        else:
            many = power
    shape = low + (high - low) * places**power
    return mean * shape / shape.mean()


def make_replay(
    *,
    density: float,
    num_layers: int,
    num_heads: int,
    seq_len: int,
    like: VerticalSlash,
    estimate: bool,
    seed: int,
) -> Replay:
    """Draws the indices of all layers, the same on every machine.

    Args:
        density: mean density over layers and heads.
        num_layers: L.
        num_heads: Hq.
        seq_len: S, a multiple of the block size.
        like: pattern whose caps give the capacities, so that kernels and lists have the same shapes
            as with selection. Also selects, if `estimate`.
        estimate: whether to also select an index, see `Replay.estimate`.
        seed: random seed.

    Returns:
        A pattern of int32 arrays [L, Hq, ...] on the host. In each layer the heads' densities are
        spread evenly from 0.5 to 1.5 of the layer's, in random order.

    Raises:
        UserError: if no index of these sizes has the density of some head.
    """
    num_blocks = seq_len // like.block_size
    rng = np.random.default_rng(seed)
    targets = _targets(rng, density, num_layers, num_heads)
    most_verticals, most_slashes = like.list_capacities(num_blocks)
    _check(targets, density, num_blocks, seq_len)
    heads = [
        _draw(rng, target, num_blocks, like.block_size, min(like.max_verticals, most_verticals))
        for target in targets.reshape(-1)
    ]
    most = max(len(slashes) for slashes, _ in heads)
    if most > most_slashes:
        raise UserError(
            f"sparsity.replay_density = {density:g} needs {most} block diagonals in its densest "
            f"head, but sparsity.max_slashes = {like.max_slashes} has room for {most_slashes}"
        )

    def padded(lists: Sequence[np.ndarray], capacity: int, fill: int) -> np.ndarray:
        table = np.full((len(lists), capacity), fill, np.int32)
        for row, values in zip(table, lists, strict=True):
            row[: len(values)] = values
        return table.reshape(num_layers, num_heads, capacity)

    def counts(lists: Sequence[np.ndarray]) -> np.ndarray:
        return np.array([len(x) for x in lists], np.int32).reshape(num_layers, num_heads)

    slashes, verticals = zip(*heads, strict=True)
    return Replay(
        slash_blocks=padded(slashes, most_slashes, num_blocks),
        slash_count=counts(slashes),
        vertical_tokens=padded(verticals, most_verticals, seq_len),
        vertical_count=counts(verticals),
        estimate=like if estimate else None,
        block_size=like.block_size,
    )


def _targets(rng: np.random.Generator, mean: float, num_layers: int, num_heads: int) -> np.ndarray:
    """Returns the densities of all heads, fp64 [L, Hq], layers and heads in random order."""
    layers = rng.permutation(layer_densities(num_layers, mean))
    spread = np.linspace(_LOWEST_HEAD, _HIGHEST_HEAD, num_heads) if num_heads > 1 else np.ones(1)
    return np.stack([layer * rng.permutation(spread) for layer in layers])


def _check(targets: np.ndarray, density: float, num_blocks: int, seq_len: int) -> None:
    """Checks that each head has pairs for two block diagonals: the main one and another."""
    least = 2 / num_blocks
    if targets.min() < least:
        raise UserError(
            f"sparsity.replay_density = {density:g} gives {targets.min():.3%} of the causal pairs "
            f"to its sparsest head, fewer than two of the {num_blocks} block diagonals of "
            f"data.seq_len = {seq_len} ({least:.3%}); use a longer sequence, smaller blocks "
            "(sparsity.block_size) or a higher density"
        )


def _draw(
    rng: np.random.Generator, density: float, num_blocks: int, block_size: int, max_verticals: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draws a head's block diagonals and columns, ascending, with the given density."""
    seq_len = num_blocks * block_size
    number = min(
        round(_COLUMNS_AT_MEAN * density / _MEAN),
        round(_MOST_IN_COLUMNS * density * seq_len),
        max_verticals,
    )
    columns = np.sort(rng.choice(seq_len, number, replace=False))
    # Counted in blocks of pairs. The main diagonal has no pairs above it.
    budget = density * (seq_len + 1) * seq_len / 2 / block_size**2
    below = num_blocks - 1 - columns // block_size  # query blocks after a column's own
    in_columns = below.sum() / block_size * (1 - density)
    near = int(np.clip(_MOST_NEAR * budget // num_blocks, 1, _NEAR))
    lengths = num_blocks - np.arange(num_blocks)  # lengths of the diagonals
    budget += num_blocks * (block_size - 1) / 2 / block_size
    room = budget - in_columns - lengths[:near].sum()
    far = rng.permutation(np.arange(near, num_blocks))
    active = np.arange(num_blocks) < near
    active[far[: np.searchsorted(np.cumsum(lengths[far]), room, side="right")]] = True
    # Less than one diagonal is missing: take the one with the closest length, if any.
    in_columns = np.cumsum(~active)[below].sum() / block_size
    missing = budget - in_columns - lengths[active].sum()
    rest = np.flatnonzero(~active)
    best = rest[np.abs(lengths[rest] - missing).argmin()]
    active[best] = lengths[best] < 2 * missing
    return np.flatnonzero(active), columns
