"""Random lists of key blocks with densities like those of a trained model, for timing.

With random weights attention is flat, so that a pattern's selection says nothing about a trained
model. Here a document's density is drawn by its length. Which blocks are computed is random.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mtraining_jax.documents import Documents
from mtraining_jax.patterns.base import Pattern
from mtraining_jax.selection.context import Selection, SelectionContext
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.limits import NonNegativeInt, PositiveInt
from pallas_kernels.index import BlockMaskIndex

BLOCK = 128
# Density of sampled rows at mass fraction 0.9, in SmolLM2-135M at 32768 tokens. It falls with the
# length to the 6.3 % at 524288 tokens that the paper reports (arXiv 2510.18830).
DENSITY, AT, POWER = 0.152, 32768, 0.318
SPREAD = 0.25  # of documents of a length: standard deviation of the logarithm
_DRAW_BITS = 16  # of the random numbers: densities are met to 2^-16


@functools.cache
def densities_by_length(seed: int, seq_len: int, min_sparse_tokens: int) -> np.ndarray:
    """Draws the density of documents of each number of tokens: float64 [S + 1].

    It is at least that of the blocks that every row keeps. Documents of one length have one
    density, because the device knows nothing else about them.
    """
    tokens, rng = np.arange(seq_len + 1), np.random.default_rng(seed)
    blocks = -(-tokens // BLOCK)
    mean = DENSITY * (np.maximum(tokens, max(min_sparse_tokens, 1)) / AT) ** -POWER
    found = np.minimum(mean * rng.lognormal(0, SPREAD, tokens.shape), 1.0)
    found = np.where(blocks * BLOCK < min_sparse_tokens, 1.0, found)
    blocks = np.maximum(blocks, 1)
    return np.maximum(found, np.minimum(_always(blocks, BLOCK) / _causal(blocks, BLOCK), 1.0))


@options
class DrawnLists(Pattern):
    """Each row of blocks keeps its document's first block, the two nearest, and random others."""

    supports_documents = True
    selects = False
    density_name = "drawn density"

    draw: NonNegativeInt = 0
    """Seed of densities and of blocks."""
    min_sparse_tokens: NonNegativeInt = 8192
    """Documents of fewer tokens, including padding, are dense."""
    block_size: PositiveInt = BLOCK
    """Tokens on a side of a block."""

    def sharded_by_query(self, documents: bool) -> bool:
        return True

    def expected_density(self, tokens: int) -> tuple[float, str]:
        return DENSITY, f"drawn by length; {DENSITY:g} at {AT} tokens"

    def capacities(self, num_blocks: int, documents: bool = False) -> tuple[int, int]:
        return num_blocks * -(-num_blocks // 32), 0

    def select(self, q: Array, k: Array, context: SelectionContext) -> Selection:
        """Draws the blocks of the local rows.

        Raises:
            UserError: if sequences have no documents.
        """
        if not context.documents.packed:
            raise UserError("DrawnLists draws by the length of documents: set data.mask_documents")
        rows, num_blocks = context.block_ids, context.num_blocks
        own = context.documents.of(rows)
        dense = own.shorter_than(-(-self.min_sparse_tokens // self.block_size))
        table = densities_by_length(self.draw, num_blocks * self.block_size, self.min_sparse_tokens)
        density = jnp.where(dense, 1.0, jnp.asarray(table, jnp.float32)[own.tokens])
        # No compiler knows whether the first query is NaN. So each layer draws and lists again, as
        # a selection would.
        key = jax.random.fold_in(jax.random.key(self.draw), jnp.isnan(q[0, 0, 0, 0]).astype(int))
        shape = (q.shape[0], q.shape[2], rows.size, num_blocks)
        drawn = jax.random.bits(key, shape, jnp.uint16).astype(jnp.int32)
        wanted = _fraction_of_others(density, own, self.block_size) * 2**_DRAW_BITS
        blocks, first = jnp.arange(num_blocks, dtype=jnp.int32), own.first[..., None]
        always = (rows[:, None] - blocks < 2) | (blocks == first)  # [B, n, NB]
        mask = always[:, None] | (drawn < wanted[:, None, :, None])
        mask &= (blocks >= first)[:, None]
        return Selection(BlockMaskIndex.from_block_mask(mask, self.block_size, rows))


def _fraction_of_others(density: Array, own: Documents, block_size: int) -> Array:
    """Fraction of the blocks that are neither first nor near to keep, fp32 [B, n]."""
    n = own.length.astype(jnp.float32)
    others = jnp.maximum((n - 2) * (n - 3) / 2, 1)
    fraction = (density * _causal(n, block_size) - _always(n, block_size)) / others
    return jnp.where(density >= 1, 1.0, jnp.clip(fraction, 0.0, 1.0))


def _causal[T: (np.ndarray, Array)](blocks: T, block_size: int) -> T:
    """Causal pairs of a document, in blocks of pairs."""
    return blocks * (blocks * block_size + 1) / (2 * block_size)


def _always[T: (np.ndarray, Array)](blocks: T, block_size: int) -> T:
    """Pairs of the diagonal, of the blocks before it, and of each row's first block."""
    diagonal = blocks * (block_size + 1) / (2 * block_size)
    return diagonal + (2 * blocks - 3) * (blocks > 1)
