"""Masks for timing attention: which blocks and columns each query head computes. Needs no JAX."""

import dataclasses
from collections.abc import Sequence

import numpy as np

BLOCK = 128
_NEAR = 8  # nearest block diagonals, which every mask has


@dataclasses.dataclass(frozen=True)
class Work:
    """Work that a kernel executes, summed over query heads.

    Attributes:
        tiles: blocks of 128 x 128 pairs.
        bars: single key columns against a block of 128 queries.
    """

    tiles: int
    bars: int = 0

    def flops(self, head_dim: int) -> float:
        """Forward pass: QK and PV of everything executed, including masked elements."""
        return 4.0 * head_dim * (BLOCK * BLOCK * self.tiles + BLOCK * self.bars)


@dataclasses.dataclass(frozen=True)
class SlashMask:
    """Block diagonals and key columns of each query head, in a sequence of `num_blocks` blocks."""

    num_blocks: int
    diagonals: tuple[np.ndarray, ...]
    verticals: tuple[np.ndarray, ...]

    def work(self) -> Work:
        """Counts a column once for every block of queries that sees it in no active block."""
        tiles = bars = 0
        for diagonals, verticals in zip(self.diagonals, self.verticals, strict=True):
            tiles += int((self.num_blocks - diagonals).sum())
            rows = self.num_blocks - verticals // BLOCK  # that see the column at all
            bars += int((rows - np.searchsorted(diagonals, rows)).sum())
        return Work(tiles, bars)


def slash_mask(name: str, rng: np.random.Generator, heads: int, seq_len: int) -> SlashMask:
    """Returns mask A, B or D.

    A: block diagonals 0..7 and 8 random distant ones, 1000 random columns. B: 6 % of the block
    diagonals (0..7 and random distant ones), 3000 random columns. D: every block diagonal.

    Raises:
        ValueError: if there is no such mask, or the sequence is too short for it.
    """
    if name not in ("A", "B", "D"):
        raise ValueError(f"mask {name!r} is not one of A, B, D")
    num_blocks = seq_len // BLOCK
    if name == "D":
        every, none = np.arange(num_blocks), np.zeros(0, int)
        return SlashMask(num_blocks, (every,) * heads, (none,) * heads)
    far = _NEAR if name == "A" else max(round(0.06 * num_blocks) - _NEAR, 1)
    columns = 1000 if name == "A" else 3000
    if _NEAR + far > num_blocks or columns > seq_len:
        raise ValueError(f"seq_len={seq_len} is too short for mask {name}")
    diagonals, verticals = [], []
    for _ in range(heads):
        some = rng.choice(np.arange(_NEAR, num_blocks), far, replace=False)
        diagonals.append(np.sort(np.concatenate([np.arange(_NEAR), some])))
        verticals.append(np.sort(rng.choice(seq_len, columns, replace=False)))
    return SlashMask(num_blocks, tuple(diagonals), tuple(verticals))


def block_mask(
    rng: np.random.Generator, heads: int, seq_len: int, density: float = 0.064
) -> np.ndarray:
    """Returns mask F: whole blocks, bool [heads, S/128, S/128].

    Each head has diagonals 0..7, and equally many random distant diagonals and random block
    columns, for about `density` of the blocks on and below the diagonal.
    """
    num_blocks = seq_len // BLOCK
    more = max(round(density * num_blocks) - 2 * _NEAR, 2)  # each has half a diagonal's blocks
    distance = np.arange(num_blocks)[:, None] - np.arange(num_blocks)
    mask = np.zeros((heads, num_blocks, num_blocks), bool)
    for head in range(heads):
        some = rng.choice(np.arange(_NEAR, num_blocks), more // 2, replace=False)
        mask[head] = np.isin(distance, np.concatenate([np.arange(_NEAR), some]))
        mask[head][:, rng.choice(num_blocks, more - more // 2, replace=False)] = True
    return mask & (distance >= 0)


def causal_tiles(heads: int, seq_len: int) -> int:
    """Blocks on and below the diagonal."""
    num_blocks = seq_len // BLOCK
    return heads * num_blocks * (num_blocks + 1) // 2


def dense_flops(heads: int, seq_len: int, head_dim: int) -> float:
    """Causal forward pass, counted as half of S x S pairs, the convention of published rates."""
    return 4.0 * head_dim * heads * seq_len**2 / 2


def padded(lists: Sequence[np.ndarray], capacity: int, padding: int) -> np.ndarray:
    """The lists of all heads in one array: int32 [heads, capacity]."""
    found = np.full((len(lists), capacity), padding, np.int32)
    for head, values in enumerate(lists):
        found[head, : len(values)] = values
    return found
