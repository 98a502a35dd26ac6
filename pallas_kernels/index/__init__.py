"""Sparse indices: which (query, key) pairs of an attention matrix are computed.

Pytrees with static shapes and dynamic counts: one compilation serves every step.
"""

from pallas_kernels.index.block_mask import BlockMaskIndex
from pallas_kernels.index.block_sparse import BlockSparseIndex
from pallas_kernels.index.dense import DenseIndex
from pallas_kernels.index.protocol import Index, Rows, Segment, ShardTiles, TiledIndex
from pallas_kernels.index.token_chunks import TokenChunksIndex
from pallas_kernels.index.vertical_slash import VerticalSlashIndex
from pallas_kernels.index.window import WindowIndex

__all__ = [
    "BlockMaskIndex",
    "BlockSparseIndex",
    "DenseIndex",
    "Index",
    "Rows",
    "Segment",
    "ShardTiles",
    "TiledIndex",
    "TokenChunksIndex",
    "VerticalSlashIndex",
    "WindowIndex",
]
