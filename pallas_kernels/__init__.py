"""Sparse attention kernels: arrays in, arrays out. Knows no model, no mesh, no config."""

from pallas_kernels.index import BlockSparseIndex, DenseIndex, Index, VerticalSlashIndex
from pallas_kernels.ops import (
    Gradients,
    Partial,
    backward,
    block_sparse_attention,
    delta_of,
    dense_attention,
    forward,
    merge,
    vertical_slash_attention,
)
from pallas_kernels.tiles import (
    DiagonalTiles,
    SegmentedDiagonals,
    VerticalColumns,
    gather_columns,
    pad_columns,
    scatter_columns,
    vertical_columns,
)

__all__ = [
    "BlockSparseIndex",
    "DenseIndex",
    "DiagonalTiles",
    "Gradients",
    "Index",
    "Partial",
    "SegmentedDiagonals",
    "VerticalColumns",
    "VerticalSlashIndex",
    "backward",
    "block_sparse_attention",
    "delta_of",
    "dense_attention",
    "forward",
    "gather_columns",
    "merge",
    "pad_columns",
    "scatter_columns",
    "vertical_columns",
    "vertical_slash_attention",
]
