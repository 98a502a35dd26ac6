"""Tiles of an index for queries and keys that are shards of a sequence."""

import abc
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.tiles import Tiles


class Segment(NamedTuple):
    """Consecutive blocks of a shard, with global numbers in an arithmetic progression."""

    first_block: int | Array  # global number of the first block; may be traced
    stride: int  # difference of consecutive global numbers (static)
    num_blocks: int  # length of the progression (static)

    def blocks(self) -> Array:
        """Returns the global number of each block: int32 [num_blocks]."""
        steps = self.stride * jnp.arange(self.num_blocks, dtype=jnp.int32)
        return (self.first_block + steps).astype(jnp.int32)


class ShardTiles(abc.ABC):
    """The tiles of every pair of shards, prepared once per layer; all segments have one stride."""

    @abc.abstractmethod
    def pair(self, query: Segment, key: Segment) -> Tiles:
        """Returns the tiles of a query segment and a key segment, which may be longer."""

    @abc.abstractmethod
    def gathered(self, query: Segment, keys: Array, skip_own: bool) -> Tiles:
        """Returns the tiles of a query segment and several consecutive key segments.

        `keys`, int32 [n], are their first blocks, with different residues modulo the stride; each
        is as long as the query's. `skip_own` skips the queries' own segment.
        """
