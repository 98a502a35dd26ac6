"""The work of one kernel call: tiles of blocks, and gathered key columns."""

from pallas_kernels.tiles.columns import (
    COLUMN_TILE,
    Columns,
    gather_columns,
    padded_columns,
    scatter_columns,
)
from pallas_kernels.tiles.tiles import (
    NO_DIAGONAL,
    DiagonalTiles,
    ListedTiles,
    SegmentedDiagonals,
    Tiles,
    count_below,
)

__all__ = [
    "COLUMN_TILE",
    "Columns",
    "DiagonalTiles",
    "ListedTiles",
    "NO_DIAGONAL",
    "SegmentedDiagonals",
    "Tiles",
    "count_below",
    "gather_columns",
    "padded_columns",
    "scatter_columns",
]
