"""Random indices of a given density, drawn on the host, the same on every machine."""

import math
from collections.abc import Sequence

import numpy as np

from mtraining_jax.utils.errors import UserError

MAX_DENSITY = 0.3  # of sparsity.replay_density
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


def layer_densities(num_layers: int, mean: float) -> np.ndarray:
    """Returns the densities of a model's layers, ascending: fp64 [L].

    Their mean is `mean`. From three layers on, the lowest and highest are those of the paper times
    mean / 6.3 %. Those between are not reported; here they follow a power of evenly spaced steps.
    """
    if num_layers == 1:
        return np.array([mean])
    low, high = _LOWEST_LAYER / _MEAN, _HIGHEST_LAYER / _MEAN
    steps = np.linspace(0, 1, num_layers)
    few, many = 0.1, 10.0  # bounds of the exponent; a higher one gives a lower mean
    for _ in range(60):
        power = (few + many) / 2
        if (low + (high - low) * steps**power).mean() > 1:
            few = power
        else:
            many = power
    shape = low + (high - low) * steps**power
    return mean * shape / shape.mean()


def draw_densities(
    rng: np.random.Generator, mean: float, num_layers: int, num_heads: int
) -> np.ndarray:
    """Returns the densities of all heads, fp64 [L, Hq], layers and heads in random order.

    In each layer they are spread evenly from 0.5 to 1.5 of the layer's density.
    """
    layers = rng.permutation(layer_densities(num_layers, mean))
    spread = np.linspace(_LOWEST_HEAD, _HIGHEST_HEAD, num_heads) if num_heads > 1 else np.ones(1)
    return np.stack([layer * rng.permutation(spread) for layer in layers])


def draw_vertical_slash(
    rng: np.random.Generator,
    density: float,
    heads: tuple[int, int],
    num_blocks: int,
    block_size: int,
    *,
    max_verticals: int,
    max_slashes: int,
    capacities: tuple[int, int],
) -> tuple[np.ndarray, ...]:
    """Draws block diagonals and columns for heads [L, Hq] with a mean density.

    Returns the four arrays of a `VerticalSlashIndex`, int32 [L, Hq, ...]. The `capacities` for
    columns and diagonals are those of a selection, so that kernels and lists have the same shapes.

    Raises:
        UserError: if no index of these sizes has the density of some head.
    """
    seq_len = num_blocks * block_size
    most_verticals, most_slashes = capacities
    targets = draw_densities(rng, density, *heads)
    least = 2 / num_blocks  # two block diagonals: the main one and another
    if targets.min() < least:
        raise _too_low(
            density,
            density * least / targets.min(),
            f"gives {targets.min():.3%} of the causal pairs to its sparsest head, fewer than two "
            f"of the {num_blocks} block diagonals of data.seq_len = {seq_len} ({least:.3%})",
        )
    most = min(max_verticals, most_verticals)
    drawn = [_draw_head(rng, target, num_blocks, block_size, most) for target in targets.flat]
    slashes, verticals = zip(*drawn, strict=True)
    longest = max(map(len, slashes))
    if longest > most_slashes:
        raise UserError(
            f"sparsity.replay_density = {density:g} needs {longest} block diagonals in its densest "
            f"head, but sparsity.max_slashes = {max_slashes} has room for {most_slashes}"
        )
    return (
        *_padded(slashes, most_slashes, num_blocks, heads),
        *_padded(verticals, most_verticals, seq_len, heads),
    )


def _padded(
    lists: Sequence[np.ndarray], capacity: int, fill: int, heads: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns lists as int32 [L, Hq, capacity], and their lengths as int32 [L, Hq]."""
    table = np.full((len(lists), capacity), fill, np.int32)
    for row, values in zip(table, lists, strict=True):
        row[: len(values)] = values
    counts = np.array([len(x) for x in lists], np.int32)
    return table.reshape(*heads, capacity), counts.reshape(heads)


def _draw_head(
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


def _too_low(density: float, least: float, why: str) -> UserError:
    """The error for a density below the least one that is possible."""
    least = math.ceil(least * 1e4) / 1e4
    way = f"set sparsity.replay_density={least:g}, or " if least <= MAX_DENSITY else ""
    return UserError(
        f"sparsity.replay_density = {density:g} {why}; {way}use a longer sequence or smaller "
        "blocks (sparsity.block_size)"
    )


def list_probabilities(
    targets: np.ndarray, num_blocks: int, block_size: int, sink_blocks: int, local_blocks: int
) -> np.ndarray:
    """Returns the probability of a block that is not forced, fp64 [n], for targets fp64 [n].

    Heads with a target below the density of forced blocks get only these; the others are made
    slightly sparser, so that the mean density is unchanged.

    Raises:
        UserError: if the forced blocks exceed the mean.
    """
    rows = np.arange(num_blocks)
    # Forced key blocks before a row's own: nearest ones, and sinks that are not near.
    near = np.minimum(rows, local_blocks - 1)
    forced = near + np.minimum(sink_blocks, rows - near)
    seq_len = num_blocks * block_size
    causal = seq_len * (seq_len + 1) / 2
    # A row's own block has no pairs above the diagonal.
    least = (num_blocks * block_size * (block_size + 1) / 2 + forced.sum() * block_size**2) / causal
    if targets.mean() < least:
        raise _too_low(
            targets.mean(),
            least,
            f"is below the density of the blocks that are always listed, {least:.3%} "
            f"(sparsity.sink_blocks = {sink_blocks}, sparsity.local_blocks = {local_blocks}, "
            f"data.seq_len = {seq_len})",
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        factor = (low + high) / 2
        if np.maximum(factor * targets, least).mean() > targets.mean():
            high = factor
        else:
            low = factor
    free = (rows - forced).sum() * block_size**2 / causal
    return np.clip((np.maximum(high * targets, least) - least) / max(free, 1e-30), 0, 1)
