"""How evenly the ranks of a ring share the work of an index."""

import numpy as np

from mtraining_jax.parallel.ring.topology import RingTopology
from pallas_kernels.index import DenseIndex, VerticalSlashIndex


def tiles_per_step(index: VerticalSlashIndex | DenseIndex, topology: RingTopology) -> np.ndarray:
    """Counts the tiles that each rank executes at each step, summed over batch and query heads.

    Columns are not counted: they are gathered and computed all at once.

    Returns:
        float64 [N, L, outer steps, inner steps], N nodes of L devices. A flat ring is one node. A
        ring that gathers keys has one inner step, the work on the keys of a whole node.
    """
    layout = topology.layout
    heads = np.asarray(index.active_diagonals(layout.num_blocks)).sum((0, 1), dtype=np.float64)
    order = layout.permutation()[:: layout.block_size] // layout.block_size
    blocks = order.reshape(layout.num_ranks, -1)
    tiles = np.zeros((layout.num_ranks, layout.num_ranks))
    for query_rank, queries in enumerate(blocks):
        for key_rank, keys in enumerate(blocks):
            distance = queries[:, None] - keys
            tiles[query_rank, key_rank] = heads[distance[distance >= 0]].sum()
    ranks, outer, inner = np.indices((layout.num_ranks, topology.outer_size, topology.inner_size))
    steps = tiles[ranks, topology.source(ranks, outer, inner)]
    if topology.gathers:
        steps = steps.sum(-1, keepdims=True)
    return steps.reshape(topology.outer_size, topology.inner_size, *steps.shape[1:])


def layer_imbalance(tiles: np.ndarray) -> float:
    """Work of the busiest rank over the mean, in the whole layer."""
    by_rank = tiles.sum((2, 3))
    return by_rank.max() / by_rank.mean()


def step_imbalance(tiles: np.ndarray) -> float:
    """Work on the path of waits over the mean work of a rank; the layer's time follows it.

    The devices of a node wait for the slowest of them at every inner step, and nodes wait for each
    other at the end of an outer step.
    """
    return tiles.max(1).sum(2).max(0).sum() / tiles.sum((2, 3)).mean()


def imbalance_of_steps(tiles: np.ndarray) -> np.ndarray:
    """Busiest over mean device of the most uneven node, [outer, inner]; 0 at steps without work."""
    mean = tiles.mean(1)
    return (tiles.max(1) / np.where(mean > 0, mean, 1)).max(0)
