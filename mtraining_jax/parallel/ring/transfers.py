"""Transfers of a ring: keys and values to the ranks that visit them, gradients back home.

On a gathered axis, each step all-gathers the shards of a group of ranks: a single kernel call
replaces a ring inside the node and keeps its running output and lse on chip. Between nodes each
device forwards only its own shard, so no byte crosses the slow links twice.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.parallel.ordering import depend_on
from mtraining_jax.parallel.ring.steps import Pair, accumulate
from mtraining_jax.parallel.ring.topology import RingAxis, RingTopology
from pallas_kernels.tiles import gather_columns, scatter_columns

# The keys and values to send on, and with a gathered axis those of the group, to attend to.
KeysInFlight = tuple[Pair, ...]
# Summed fp32 (dk, dv) of visited shards, and with a gathered axis those of the last step's group.
GradsInFlight = tuple[Pair, Pair | None]


class Transfers:
    """Moves the shards of one rank, and views the shards of its group as key segments."""

    def __init__(self, topology: RingTopology):
        self._gathered, self._group_size = topology.gathered, topology.group_size
        self._num_segments = len(topology.layout.segments(0))
        self._rotating = tuple(name for axis in topology.rotating for name in axis.names)

    def hold(self, kv: Pair) -> KeysInFlight:
        """Gathers keys and values [B, n, Hk, D] over the group, along the tokens."""
        if self._gathered is None:
            return (kv,)
        names = self._gathered.names
        return kv, jax.tree.map(lambda x: lax.all_gather(x, names, axis=1, tiled=True), kv)

    def advance(self, axis: RingAxis, held: KeysInFlight) -> KeysInFlight:
        """Sends shards to the next rank of a rotating axis; returns those of the previous one."""
        return self.hold(axis.shift(held[0]))

    def defer(self, collected: Pair | None, shares: Pair) -> GradsInFlight:
        """Adds a step's gradients, or keeps them until they are scattered during the next step."""
        if self._gathered is None:
            return accumulate(collected, shares), None
        if collected is None:
            batch, tokens, *heads = shares[0].shape
            zeros = jnp.zeros((batch, tokens // self._group_size, *heads), jnp.float32)
            collected = zeros, zeros
        return collected, shares

    def settle(self, pending: tuple[Pair | None, Pair | None]) -> Pair:
        """Returns the sums of a shard, after reduce-scattering the gradients of its group."""
        collected, shares = pending
        if shares is not None and self._gathered is not None:
            names = self._gathered.names
            shares = jax.tree.map(
                lambda x: lax.psum_scatter(x, names, scatter_dimension=1, tiled=True), shares
            )
        return accumulate(collected, shares)

    def columns_first(
        self, positions: Array | None, held: KeysInFlight, source: Pair
    ) -> tuple[Pair | None, KeysInFlight]:
        """Fetches the columns from `source`; on CPU, holds back the first transfer until then."""
        columns = None
        if positions is not None:
            columns = gather_columns(source[0], positions), gather_columns(source[1], positions)
            # Each rank contributes its own columns and zeros elsewhere, so the sum is exact.
            columns = lax.psum(columns, self._rotating) if self._rotating else columns
        if not self._rotating or (columns is None and self._gathered is None):
            return columns, held
        kv = depend_on(held[0], source[0] if columns is None else columns[0])
        return columns, (kv, *held[1:])

    def add_columns(self, dkv: Pair, columns: Pair, positions: Array | None) -> Pair:
        """Sums fp32 column gradients [B, Mv, Hq, D] over ranks and adds those of local columns."""
        assert positions is not None
        if self._rotating:
            columns = lax.psum(depend_on(columns, dkv[0]), self._rotating)
        dk, dv = (scatter_columns(x, y, positions) for x, y in zip(dkv, columns, strict=True))
        return dk, dv

    def key_segments(self, here: Pair) -> list[Pair]:
        """Returns the key segments of a group; in a zigzag layout the second ones are reversed."""
        if self._num_segments == 1:
            return [here]

        def arrange(x: Array) -> list[Array]:
            parts = x.reshape(x.shape[0], self._group_size, 2, -1, *x.shape[2:])
            first, second = parts[:, :, 0], jnp.flip(parts[:, :, 1], axis=1)
            return [part.reshape(x.shape[0], -1, *x.shape[2:]) for part in (first, second)]

        return list(zip(*map(arrange, here), strict=True))

    def restore(self, dkv: list[Pair]) -> Pair:
        """Reorders the gradients of key segments into the order of the shards."""
        if len(dkv) == 1:
            return dkv[0]

        def interleave(first: Array, second: Array) -> Array:
            shape = first.shape[0], self._group_size, -1, *first.shape[2:]
            first, second = first.reshape(shape), jnp.flip(second.reshape(shape), axis=1)
            both = jnp.stack([first, second], axis=2)
            return both.reshape(both.shape[0], -1, *both.shape[4:])

        return jax.tree.map(interleave, *dkv)
