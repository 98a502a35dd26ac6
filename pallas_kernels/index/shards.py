"""The tiles of an index where queries and keys are shards of a sequence."""

import abc
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.tiles import Tiles


class Segment(NamedTuple):
    """Blocks of a shard, one after another, whose global numbers are an arithmetic progression.

    Attributes:
        first_block: global number of the first block; may be traced.
        stride: distance of consecutive global numbers (static).
        num_blocks: length of the progression (static).
    """

    first_block: int | Array
    stride: int
    num_blocks: int

    def blocks(self) -> Array:
        """Int32 [num_blocks]: the global number of each block."""
        steps = self.stride * jnp.arange(self.num_blocks, dtype=jnp.int32)
        return (self.first_block + steps).astype(jnp.int32)


class ShardTiles(abc.ABC):
    """The tiles of every pair of shards, from what is prepared once for a layer.

    All segments of queries and keys have one stride, of which the sequence's blocks are a
    multiple. First blocks may be traced.
    """

    @abc.abstractmethod
    def pair(self, query: Segment, key: Segment) -> Tiles:
        """The tiles of queries in one segment and keys in another, which may be longer."""

    @abc.abstractmethod
    def gathered(self, query: Segment, keys: Array, skip_own: bool) -> Tiles:
        """The tiles of queries in one segment and keys in several, one after another.

        Args:
            query: the queries.
            keys: int32 [n], first blocks of the key segments, each as long as the query's, with
                different residues modulo the stride.
            skip_own: whether to leave out the queries' own segment, which is then among the keys'.
        """
