"""Pictures of sparse attention masks, a pixel a block."""

import os
from collections.abc import Sequence

import numpy as np

from pallas_kernels.index import VerticalSlashIndex

_MOST_PIXELS = 512


def block_shares(index: VerticalSlashIndex, seq_len: int, batch: int, head: int) -> np.ndarray:
    """Share of the causal pairs of each block that is computed.

    Args:
        index: concrete arrays.
        seq_len: S.
        batch: entry of the batch.
        head: query head.

    Returns:
        fp32 [S/g, S/g], queries by keys; NaN above the diagonal.
    """
    size = index.block_size
    blocks = seq_len // size
    slashes = np.asarray(index.slash_blocks[batch, head])[: int(index.slash_count[batch, head])]
    columns = np.asarray(index.vertical_tokens[batch, head])
    columns = columns[: int(index.vertical_count[batch, head])]
    per_block = np.bincount(columns // size, minlength=blocks) / size
    distance = np.arange(blocks)[:, None] - np.arange(blocks)
    shares = np.where(np.isin(distance, slashes), 1.0, per_block).astype(np.float32)
    # On the diagonal a column of token t is seen by the g - t % g rows from t on.
    own = np.bincount(columns // size, weights=size - columns % size, minlength=blocks)
    if 0 not in slashes:
        np.fill_diagonal(shares, own / (size * (size + 1) / 2))
    shares[distance < 0] = np.nan
    return shares


def draw(
    path: str | os.PathLike,
    index: VerticalSlashIndex,
    seq_len: int,
    batch: int,
    heads: Sequence[int],
    titles: Sequence[str],
) -> None:
    """Writes a PNG with the block shares of some heads side by side; see `Inspection`.

    Raises:
        ImportError: if matplotlib is not installed; says how to get it.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib: pip install 'mtraining-jax[plot]'"
        ) from error
    figure = Figure(figsize=(0.6 + 3.2 * len(heads), 3.6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    colours = colormaps["Blues"].with_extremes(bad="0.93")
    for i, (head, title) in enumerate(zip(heads, titles, strict=True)):
        axes = figure.add_subplot(1, len(heads), i + 1)
        shares = _shrunk(block_shares(index, seq_len, batch, head))
        # Square root: a single column of a block of 128 is to be seen.
        axes.imshow(
            np.sqrt(shares), cmap=colours, vmin=0, vmax=1, interpolation="nearest",
            extent=(0, seq_len, seq_len, 0),
        )
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("key", fontsize=9)
        if i == 0:
            axes.set_ylabel("query", fontsize=9)
        axes.tick_params(labelsize=7)
    figure.savefig(path, format="png")


def _shrunk(shares: np.ndarray) -> np.ndarray:
    """Means over squares of blocks, at most `_MOST_PIXELS` a side; NaN where all of them are."""
    step = -(-shares.shape[0] // _MOST_PIXELS)
    if step == 1:
        return shares
    side = -(-shares.shape[0] // step)
    padded = np.full((side * step, side * step), np.nan, np.float32)
    padded[: shares.shape[0], : shares.shape[1]] = shares
    squares = padded.reshape(side, step, side, step)
    there = ~np.isnan(squares)
    count = there.sum((1, 3))
    total = np.where(there, squares, 0).sum((1, 3))
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
