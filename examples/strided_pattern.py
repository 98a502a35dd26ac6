r"""A user-defined sparse pattern: a window, and blocks at a fixed stride before it.

    python train.py --config tiny --parallel.ring=gather \
        --sparsity.kind=examples.strided_pattern:Strided --sparsity.stride=4

or, in your own model, `sparse_attention(q, k, v, pattern=Strided(stride=4))`.
"""

import jax
import jax.numpy as jnp

from mtraining_jax import Pattern, Selection, SelectionContext, options
from mtraining_jax.utils.limits import PositiveInt
from pallas_kernels import BlockSparseIndex


@options
class Strided(Pattern):
    """The nearest key blocks, and every `stride`-th block before them."""

    window: PositiveInt = 2
    """Nearest key blocks of every query block, including its own."""
    stride: PositiveInt = 8
    """Distance in blocks between selected blocks further back."""
    block_size: PositiveInt = 128
    """Block size in tokens."""

    def select(self, q: jax.Array, k: jax.Array, context: SelectionContext) -> Selection:
        """Selects the same blocks for every head, independent of q and k."""
        blocks = jnp.arange(context.num_blocks)
        distance = blocks[:, None] - blocks
        seen = (distance < self.window) | (blocks % self.stride == 0)
        seen = jnp.broadcast_to(seen, (q.shape[0], q.shape[2], *seen.shape))
        return Selection(BlockSparseIndex.from_block_mask(seen, self.block_size))

    def describe(self) -> str:
        return f"a window of {self.window} blocks and one block in {self.stride} before it"
