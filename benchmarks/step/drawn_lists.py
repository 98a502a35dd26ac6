"""Lists of key blocks that compute the densities which `benchmarks/balance.py` draws: for timing.

Random weights have flat attention, so what a pattern chooses there says nothing of a trained model.
Here the density of each document is given, by its length, and follows the share of mass that is
kept as that of a real model does; which blocks are computed is random.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.step import balance
from mtraining_jax.errors import UserError
from mtraining_jax.limits import check_limits, limited
from mtraining_jax.sparsity import Choice, Pattern, Shards
from mtraining_jax.sparsity.pattern import KeptShare

if TYPE_CHECKING:
    from jax import Array

    from mtraining_jax.sparsity.document_blocks import DocumentBlocks

_SHARE_BITS = 15
_DRAW_BITS = 16  # of the random numbers: densities are met to 2^-16


@functools.cache
def densities_by_length(seed: int, seq_len: int, dense_below: int) -> np.ndarray:
    """The density of a document of each number of tokens: float64 [S + 1].

    As `balance.true_densities` draws them, but not less than the blocks that every row keeps.
    Documents of one length have one density, as nothing else is known of them on the device.
    """
    tokens, rng = np.arange(seq_len + 1), np.random.default_rng(seed)
    blocks = np.maximum(-(-tokens // balance.BLOCK), 1)
    least = _always(blocks, balance.BLOCK) / _causal(blocks, balance.BLOCK)
    return np.maximum(balance.true_densities(rng, tokens, dense_below), np.minimum(least, 1.0))


@dataclasses.dataclass(frozen=True)
class DrawnLists(Pattern):
    """Each row of blocks keeps its document's first block, its two nearest, and random others.

    Attributes:
        draw: seed of densities and of blocks.
        tau: share of mass that the drawn densities are of. Another one, as tuned, computes more or
            fewer pairs, as sampled rows of SmolLM2-135M at 32768 tokens do.
        dense_below: documents of fewer tokens, padding included, keep all of their pairs.
        block_size: g, tokens on a side of a block.
    """

    by_rows = True
    reads_documents = True
    chooses = False
    density_name = "drawn density"

    draw: limited(int, ge=0) = 0
    tau: limited(float, gt=0, le=1) = balance.BOUNDS.base
    dense_below: limited(int, ge=0) = balance.DENSE_BELOW
    block_size: limited(int, ge=1) = balance.BLOCK

    def __post_init__(self) -> None:
        check_limits(self)

    def kept_share(self) -> KeptShare:
        """`tau`."""
        return KeptShare("tau", _SHARE_BITS)

    def expected_density(self, tokens: int) -> tuple[float, str]:
        """That of a document of 32768 tokens."""
        return balance.DENSITY, f"drawn by length; {balance.DENSITY:g} at {balance.AT} tokens"

    def capacities(self, num_blocks: int, documents: bool = False) -> tuple[int, int]:
        """A bit for each block."""
        return num_blocks * -(-num_blocks // 32), 0

    def choose(self, q: "Array", k: "Array", shards: Shards) -> Choice:
        """Draws the blocks of the local rows; all of it depends on q in name only.

        Raises:
            UserError: sequences have no documents.
        """
        import jax
        import jax.numpy as jnp

        from pallas_kernels.index import BlockMaskIndex

        if shards.documents is None:
            raise UserError("DrawnLists draws by the length of documents: set data.documents")
        rows, num_blocks = shards.block_ids, shards.num_blocks
        own = shards.documents.dense_below(-(-self.dense_below // self.block_size)).of(rows)
        density = self._densities(own, num_blocks * self.block_size, shards.shares)
        # Whether the first query is a number no compiler knows. So each layer draws anew, and
        # makes its own lists, as it does where the choice is used.
        key = jax.random.fold_in(jax.random.key(self.draw), jnp.isnan(q[0, 0, 0, 0]).astype(int))
        shape = (q.shape[0], q.shape[2], rows.size, num_blocks)
        drawn = jax.random.bits(key, shape, jnp.uint16).astype(jnp.int32)
        wanted = _share_of_free(density, own, self.block_size) * 2**_DRAW_BITS
        blocks, first = jnp.arange(num_blocks, dtype=jnp.int32), own.first[..., None]
        always = (rows[:, None] - blocks < 2) | (blocks == first)  # [B, n, NB]
        mask = always[:, None] | (drawn < wanted[:, None, :, None])
        mask &= (blocks >= first)[:, None]
        return Choice(BlockMaskIndex.from_block_mask(mask, self.block_size, rows))

    def _densities(
        self, own: "DocumentBlocks", seq_len: int, shares: "Array | None"
    ) -> "Array":
        """Of the document of each row, fp32 [B, n]."""
        import jax.numpy as jnp

        table = densities_by_length(self.draw, seq_len, self.dense_below)
        found = jnp.asarray(table, jnp.float32)[own.tokens]
        if shares is not None:
            at = shares.astype(jnp.float32) / 2**_SHARE_BITS
            grown = jnp.interp(at, jnp.array(balance.SHARES), jnp.array(balance.DENSITIES))
            found = jnp.minimum(found * (grown / balance.DENSITY)[:, None], 1.0)
        return jnp.where(own.dense, 1.0, found)


def _share_of_free(density: "Array", own: "DocumentBlocks", block_size: int) -> "Array":
    """The share that is kept of blocks that are neither first nor near: fp32 [B, n]."""
    import jax.numpy as jnp

    n = own.length.astype(jnp.float32)
    free = jnp.maximum((n - 2) * (n - 3) / 2, 1)
    share = (density * _causal(n, block_size) - _always(n, block_size)) / free
    return jnp.where(density >= 1, 1.0, jnp.clip(share, 0.0, 1.0))


def _causal(blocks: "np.ndarray | Array", block_size: int) -> "np.ndarray | Array":
    """Pairs of a document of some blocks, in blocks of pairs."""
    return blocks * (blocks * block_size + 1) / (2 * block_size)


def _always(blocks: "np.ndarray | Array", block_size: int) -> "np.ndarray | Array":
    """Those of its diagonal, of the blocks before that, and of each row's first block."""
    diagonal = blocks * (block_size + 1) / (2 * block_size)
    return diagonal + (2 * blocks - 3) * (blocks > 1)
