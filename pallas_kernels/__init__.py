"""Sparse attention kernels on plain arrays, independent of models, meshes and configurations."""

from pallas_kernels.index import (
    BlockMaskIndex,
    BlockSparseIndex,
    DenseIndex,
    Index,
    TiledIndex,
    TokenChunksIndex,
    VerticalSlashIndex,
    WindowIndex,
)
from pallas_kernels.interface import Gradients, Plan
from pallas_kernels.one_device import attention
from pallas_kernels.ops import backward, delta_of, forward, plan
from pallas_kernels.tiles import (
    Columns,
    DiagonalTiles,
    ListedTiles,
    SegmentedDiagonals,
    gather_columns,
    scatter_columns,
)

__all__ = [
    "BlockMaskIndex",
    "BlockSparseIndex",
    "Columns",
    "DenseIndex",
    "DiagonalTiles",
    "Gradients",
    "Index",
    "ListedTiles",
    "Plan",
    "SegmentedDiagonals",
    "TiledIndex",
    "TokenChunksIndex",
    "VerticalSlashIndex",
    "WindowIndex",
    "attention",
    "backward",
    "delta_of",
    "forward",
    "gather_columns",
    "plan",
    "scatter_columns",
]
