"""Masks of indices and tiles in plain NumPy, directly from their definitions.

Independent of the package's helpers, so that their mistakes show.
"""

import numpy as np

from pallas_kernels import (
    BlockMaskIndex,
    BlockSparseIndex,
    DenseIndex,
    DiagonalTiles,
    Index,
    WindowIndex,
)
from pallas_kernels.tiles import NO_DIAGONAL


def index_mask(index: Index, seq_len: int) -> np.ndarray:
    """Bool [B, Hq, S, S] (query, key), or [1, 1, S, S]: the pairs an index computes."""
    if isinstance(index, DenseIndex) and index.first is None:
        everything = np.ones((1, 1, seq_len, seq_len), bool)
        return np.tril(everything) if index.causal else everything
    if isinstance(index, WindowIndex):
        distance = np.arange(seq_len)[:, None] - np.arange(seq_len)
        return index_mask(index.documents, seq_len) & (distance < index.window)
    if isinstance(index, DenseIndex):
        first, end = (np.asarray(x) for x in (index.first, index.end))
        blocks = np.zeros((*first.shape, first.shape[-1]), bool)
        for b, h, i in np.ndindex(*first.shape):
            blocks[b, h, i, first[b, h, i] : end[b, h, i]] = True
        return np.tril(expand(blocks, index.block_size))
    if isinstance(index, BlockSparseIndex):
        return block_sparse_mask(index)
    if isinstance(index, BlockMaskIndex):
        mask = expand(_bits(index.bits, index.num_blocks), index.block_size)
        if index.column_marks is not None:
            columns = _bits(index.column_marks, index.block_size)
            columns = columns.reshape(*columns.shape[:2], 1, seq_len)
            if index.column_start is not None:
                start = np.asarray(index.column_start).repeat(index.block_size, axis=-1)
                columns = columns & (np.arange(seq_len) // index.block_size >= start[..., None])
            mask = mask | columns
        return np.tril(mask)
    g = index.block_size
    slashes, slash_count = np.asarray(index.slash_blocks), np.asarray(index.slash_count)
    verticals, vertical_count = (
        np.asarray(index.vertical_tokens),
        np.asarray(index.vertical_count),
    )
    block = np.arange(seq_len // g)
    distance = block[:, None] - block[None, :]
    mask = np.zeros((*slash_count.shape, seq_len, seq_len), bool)
    for b, h in np.ndindex(*slash_count.shape):
        mask[b, h] = expand(np.isin(distance, slashes[b, h, : slash_count[b, h]]), g)
        mask[b, h][:, verticals[b, h, : vertical_count[b, h]]] = True
    return mask & np.tril(np.ones((seq_len, seq_len), bool))


def _bits(words, size: int) -> np.ndarray:
    """Unpacks words uint32 [..., w] to bool [..., size]."""
    number = np.arange(size)
    return np.asarray(words)[..., number // 32] >> (number % 32) & 1 > 0


def block_sparse_mask(index: BlockSparseIndex) -> np.ndarray:
    """Bool [B, Hq, Sq, Sk] from the lists of key blocks."""
    key_blocks, key_count = np.asarray(index.key_blocks), np.asarray(index.key_count)
    num_columns = index.query_count.shape[-1]
    blocks = np.zeros((*key_count.shape, num_columns), bool)
    for b, h, i in np.ndindex(*key_count.shape):
        blocks[b, h, i, key_blocks[b, h, i, : key_count[b, h, i]]] = True
    mask = expand(blocks, index.block_size)
    return np.tril(mask) if index.causal else mask


def tile_blocks(tiles: DiagonalTiles, num_rows: int, num_columns: int) -> np.ndarray:
    """Bool [B, Hq, num_rows, num_columns]: the blocks that diagonal tiles visit."""
    offsets, start, stop = (np.asarray(x) for x in (tiles.offsets, tiles.start, tiles.stop))
    blocks = np.zeros((*start.shape, num_rows, num_columns), bool)
    for b, h, i, j in np.ndindex(*blocks.shape):
        blocks[b, h, i, j] = i - j in offsets[b, h, start[b, h] : stop[b, h]]
    return blocks


def tile_mask(tiles: DiagonalTiles, num_rows: int, num_columns: int) -> np.ndarray:
    """Bool [B, Hq, nq, nk]: the pairs that diagonal tiles compute."""
    g = tiles.block_size
    mask = expand(tile_blocks(tiles, num_rows, num_columns), g)
    if (diagonal := int(tiles.diagonal)) != NO_DIAGONAL:
        rows, columns = np.arange(num_rows * g)[:, None], np.arange(num_columns * g)
        on_diagonal = rows // g - columns // g == diagonal
        mask &= ~on_diagonal | (rows % g >= columns % g)
    return mask


def expand(blocks: np.ndarray, block_size: int) -> np.ndarray:
    """Expands a mask of blocks to a mask of pairs."""
    return blocks.repeat(block_size, axis=-2).repeat(block_size, axis=-1)


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Attention one row at a time in fp64; shapes as in `reference_attention`."""
    batch, num_rows, heads, _ = q.shape
    group = heads // k.shape[2]
    out = np.zeros(q.shape, np.float64)
    lse = np.full((batch, heads, num_rows), -np.inf)
    for b, h, row in np.ndindex(batch, heads, num_rows):
        keys = np.flatnonzero(mask[b, h, row])
        if not keys.size:
            continue
        logits = scale * (k[b, keys, h // group] @ q[b, row, h])
        weights = np.exp(logits - logits.max())
        lse[b, h, row] = np.log(weights.sum()) + logits.max()
        out[b, row, h] = weights / weights.sum() @ v[b, keys, h // group]
    return out, lse
