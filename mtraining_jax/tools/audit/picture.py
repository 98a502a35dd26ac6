"""Pictures of sparse attention masks, one pixel per block."""

import importlib.util
import os
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import Array

from mtraining_jax.utils.errors import UserError
from pallas_kernels.index import Index, TokenChunksIndex

_MOST_PIXELS = 512
_ROWS_AT_ONCE = 64  # in blocks; bounds memory


def check_pictures(asked_for_by: str) -> None:
    """Raises UserError, naming the option, if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            f"{asked_for_by} draws pictures, which needs matplotlib: uv run --extra plot, or pip "
            "install matplotlib"
        )


def block_shares(index: Index, seq_len: int, batch: int, head: int) -> np.ndarray:
    """Computes the density of each block of one head's mask: fp32 [S/g, S/g], queries by keys.

    NaN above the diagonal. The index has concrete arrays.
    """
    size = index.block_size
    blocks = np.arange(seq_len // size)
    shares = np.zeros((blocks.size, blocks.size), np.float32)
    one_head = index_of_head(index, batch, head)
    # All queries of a block share their keys, except where each token selects its own.
    queries = range(size) if isinstance(index, TokenChunksIndex) else range(1)
    for start in range(0, blocks.size, _ROWS_AT_ONCE):
        rows = blocks[start : start + _ROWS_AT_ONCE]
        for query in queries:
            listed = jax.device_get(_computes(one_head, rows * size + query, blocks))
            listed = np.broadcast_to(listed, (rows.size, blocks.size, size))
            shares[rows] += listed.mean(-1) / len(queries)
        # In the diagonal block of such a query, key t is seen by the g - t queries from t on.
        if len(queries) == 1:
            seen_by = np.arange(size, 0, -1)
            shares[rows, rows] = listed[np.arange(rows.size), rows] @ seen_by / seen_by.sum()
    shares[np.triu_indices(blocks.size, 1)] = np.nan
    return shares


def index_of_head(index: Index, batch: int, head: int) -> Index:
    """Returns the index of one head, with arrays [1, 1, ...]."""
    return jax.tree.map(lambda x: x[batch, head][None, None], index)


@jax.jit
def _computes(index: Index, query_positions: Array, key_blocks: Array) -> Array:
    """Returns the computed pairs of a single head: bool [queries or 1, blocks, g or 1]."""
    return index.computes(query_positions, key_blocks)[0, 0]


class Panel(NamedTuple):
    """One mask of a picture: an index with concrete arrays, batch entry, head and title."""

    index: Index
    batch: int
    head: int
    title: str


def draw(
    path: str | os.PathLike, panels: Sequence[Panel], seq_len: int, borders: Sequence[int] = ()
) -> None:
    """Writes a PNG with the block densities of the panels; `borders` are those of documents."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(0.6 + 3.2 * len(panels), 3.6), dpi=100, layout="constrained")
    colors = colormaps["Blues"].with_extremes(bad="0.93")
    for i, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), i + 1)
        shares = _shrunk(block_shares(panel.index, seq_len, panel.batch, panel.head))
        # Square root, so that a single column in a block of 128 is visible.
        scale = {"vmin": 0, "vmax": 1, "extent": (0, seq_len, seq_len, 0)}
        axes.imshow(np.sqrt(shares), cmap=colors, interpolation="nearest", **scale)
        for border in borders:
            axes.axhline(border, color="0.6", linewidth=0.4)
            axes.axvline(border, color="0.6", linewidth=0.4)
        axes.set_title(panel.title, fontsize=9)
        axes.set_xlabel("key", fontsize=9)
        if i == 0:
            axes.set_ylabel("query", fontsize=9)
        axes.tick_params(labelsize=7)
    figure.savefig(path, format="png")


def _shrunk(shares: np.ndarray) -> np.ndarray:
    """Averages squares of blocks down to at most `_MOST_PIXELS` a side; NaN if all are NaN."""
    step = -(-shares.shape[0] // _MOST_PIXELS)
    if step == 1:
        return shares
    side = -(-shares.shape[0] // step)
    missing = side * step - shares.shape[0]
    padded = np.pad(shares, (0, missing), constant_values=np.nan)
    squares = padded.reshape(side, step, side, step)
    count = (~np.isnan(squares)).sum((1, 3))
    return np.where(count > 0, np.nansum(squares, (1, 3)) / np.maximum(count, 1), np.nan)
