"""Keys in 8 bits, and softmax masses of key blocks that are estimated with them.

A key is coded as the mean of its block, in the keys' dtype, and an e4m3 deviation from that mean.
Without the mean, large key biases make the errors of codes too large: in the first layer of
Qwen2.5, with biases above 300, logits had errors of 14 nats without and 0.2 with it.
"""

import abc
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.checks import BLOCK_SIZE
from pallas_kernels.masses import MASS_BITS, ScoreTiles, parts_at_once

CODE = jnp.float8_e4m3fn
WEIGHT_BLOCKS = 64  # weights are of a multiple of this many key blocks
# Codes are at most 2^4, so that a product of 128 of them is at most 2^15, within fp16.
_MOST_BITS = 4
TAU_BITS = 15  # of shares of a mass
_FRACTION_BITS = 23  # of fp32
_WEIGHT_BYTES = 1 << 28  # of weights in memory at a time, if that fills the GPU


class Fp8Keys(NamedTuple):
    """Keys as e4m3 deviations from the means of their blocks of 128 tokens."""

    codes: Array  # e4m3 [B, S, Hk, D], (key - mean) / unit
    means: Array  # [B, NB, Hk, D], in the dtype of the keys
    units: Array  # fp32 [B, NB, Hk], powers of two


class Fp8Call(NamedTuple):
    """Rows to score, in whole tiles of a kernel."""

    q: Array  # [B, R, Hq, D], bf16 or fp16
    codes: Array  # e4m3 [B, R, Hq, D], q / unit
    units: Array  # fp32 [B, Hq, R], powers of two
    keys: Fp8Keys
    places: Array  # int32 [B, R] or (without starts) [1, R], the last key seen, or -1
    starts: Array | None  # int32 [B, R], the first one, at the start of a block; None for 0
    scale: float  # of the products, positive


def encode_keys(k: Array) -> Fp8Keys:
    """Codes keys [B, S, Hk, D]; S is a multiple of 128. A block depends on its keys only."""
    blocks = k.reshape(k.shape[0], -1, BLOCK_SIZE, *k.shape[2:]).astype(jnp.float32)
    total = blocks
    while total.shape[2] > 1:  # in a fixed order of additions
        half = total.shape[2] // 2
        total = total[:, :, :half] + total[:, :, half:]
    means = (total * (1 / BLOCK_SIZE)).astype(k.dtype)
    rest = blocks - means.astype(jnp.float32)
    units = _unit(jnp.abs(rest).max((2, 4), keepdims=True))
    codes = (rest / units).astype(CODE).reshape(k.shape)
    return Fp8Keys(codes, means[:, :, 0], units[:, :, 0, :, 0])


def encode_rows(q: Array) -> tuple[Array, Array]:
    """Codes rows [B, R, Hq, D]: e4m3 [B, R, Hq, D] and units, fp32 [B, Hq, R]."""
    wide = q.astype(jnp.float32)
    units = _unit(jnp.abs(wide).max(3, keepdims=True))
    return (wide / units).astype(CODE), units[..., 0].swapaxes(1, 2)


def _unit(largest: Array) -> Array:
    """Returns the unit of values up to `largest`, fp32: a power of two, with codes up to 16."""
    exponent = lax.bitcast_convert_type(largest, jnp.int32) >> _FRACTION_BITS
    exponent = jnp.maximum(exponent - _MOST_BITS + 1, 1)
    return lax.bitcast_convert_type(exponent << _FRACTION_BITS, jnp.float32)


class KeepRule(NamedTuple):
    """Which key blocks a query block keeps: the heaviest, until a share of its mass is reached."""

    own: Array  # int32 [B or 1, n], the last key block seen
    first: Array  # int32 [B or 1, n], the first one
    forced_end: Array  # int32 [B or 1, n], blocks before it are kept and count first
    tau: Array  # int32 [B or 1, n], mass fraction to keep, in units of 2^-TAU_BITS
    local_blocks: int  # the last ones, kept and counted first as well
    least: int  # mass in units of 2^-30, at least 1; lighter blocks are kept only if forced
    rows: int  # rows of a query block


class Fp8Scores(abc.ABC):
    """Scores key blocks for rows of queries with 8-bit keys; subclasses provide the kernel."""

    @abc.abstractmethod
    def tiles(self) -> ScoreTiles:
        """Returns the sizes of tiles."""

    @abc.abstractmethod
    def weights(self, call: Fp8Call) -> tuple[Array, Array]:
        """Returns weights of blocks, fp16 [B, Hq, NB', R], and of all blocks, fp32 [B, Hq, R].

        NB' is NB rounded up to a multiple of `WEIGHT_BLOCKS`. A weight is the base-2 logarithm of
        the sum of exp(scale q k) over the keys that a row sees, -inf for none, relative to that of
        the row's last block. Where a row sees all 128 keys of a block, they are 16 in each of eight
        interleaved classes; of a class the largest term and four in fixed positions are computed,
        and the others are taken to be as large as those on average. Weights are arbitrary in blocks
        that no row of a tile sees.
        """

    def keeps(self, num_rows: int, num_blocks: int) -> bool:
        """Whether `kept` supports r rows of each query block and NB key blocks."""
        del num_rows, num_blocks
        return False

    def kept(self, weights: Array, totals: Array, rule: KeepRule) -> Array:
        """Returns the bits of the kept blocks, uint32 [B, Hq, n, NB / 32 or more], from `weights`.

        The mass of a block is the sum over the rows of 2^(weight - weight of all blocks), each
        rounded to an integer in units of 2^-30 r. Blocks are kept while the mass before them is
        below the share, heaviest first; ties go to the smaller block number.
        """
        raise NotImplementedError(f"{type(self).__name__}.kept")

    def rows_at_once(self, batch: int, heads: int, rows: int, local: int, blocks: int) -> int:
        """Returns how many of `local` query blocks, of `rows` rows each, to score at a time."""
        tiles = self.tiles()
        blocks_per_tile = max(tiles.rows // rows, 1)
        bytes_of_tile = 2 * batch * heads * blocks_per_tile * rows * blocks
        # At least one item for each thread block, however long the sequence is.
        room = max(_WEIGHT_BYTES / bytes_of_tile, tiles.programs / (batch * heads))
        parts = parts_at_once(-(-local // blocks_per_tile), batch * heads, tiles.programs, room)
        return min(blocks_per_tile * parts, local)

    def score(
        self, q: Array, keys: Fp8Keys, places: Array, first_blocks: Array | None, scale: float
    ) -> tuple[Array, Array]:
        """Computes `weights` for the rows of query blocks, padded to whole tiles.

        A row's result depends on no other row and not on the number of its first block.

        Args:
            q: [B, n, r, Hq, D], r rows of each of n query blocks.
            keys: keys of NB blocks.
            places: int32 [B or 1, n, r], the last key that each row sees, or -1.
            first_blocks: int32 [B, n], first key block that the rows of a block see, or None.
            scale: scale of the logits.
        """
        batch, num_local, num_rows, heads, dim = q.shape
        padding = -(num_local * num_rows) % self.tiles().rows
        q = jnp.pad(q.reshape(batch, -1, heads, dim), ((0, 0), (0, padding), (0, 0), (0, 0)))
        places = places.reshape(places.shape[0], -1)
        starts = None
        if first_blocks is not None:
            starts = jnp.repeat(first_blocks * BLOCK_SIZE, num_rows, axis=1)
            starts = jnp.pad(starts, ((0, 0), (0, padding)))
            places = jnp.broadcast_to(places, (batch, places.shape[1]))
        places = jnp.pad(places, ((0, 0), (0, padding)), constant_values=-1)
        codes, units = encode_rows(q)
        return self.weights(Fp8Call(q, codes, units, keys, places, starts, scale))

    def block_masses(
        self,
        q: Array,
        keys: Fp8Keys,
        places: Array,
        first_blocks: Array | None = None,
        *,
        scale: float,
    ) -> Array:
        """Estimates the softmax mass of each key block, mean over the rows of a query block.

        Takes the arguments of `score`. Returns fp32 [B, Hq, n, NB], multiples of 2^-30; arbitrary
        after the last block that a row sees and before its first block.
        """
        weights, totals = self.score(q, keys, places, first_blocks, scale)
        weights = weights[:, :, : keys.means.shape[1]]
        totals = jnp.where(totals > -jnp.inf, totals, 0.0)  # for rows without keys
        share = jnp.exp2(weights.astype(jnp.float32) - totals[:, :, None])
        num_local, num_rows = q.shape[1:3]
        shares = (share * (float(1 << MASS_BITS) / num_rows) + 0.5).astype(jnp.int32)
        shares = shares[..., : num_local * num_rows].reshape(*shares.shape[:3], num_local, num_rows)
        masses = shares.sum(-1, dtype=jnp.int32).astype(jnp.float32) * 2.0**-MASS_BITS
        return jnp.swapaxes(masses, 2, 3)
