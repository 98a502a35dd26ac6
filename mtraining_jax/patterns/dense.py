"""Attention to all keys, or to those of a sliding window, computed by the same kernels."""

from mtraining_jax.patterns.base import BlockSize, Pattern
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.limits import PositiveInt, Window


@options
class Dense(Pattern):
    """Every causal pair (of each document); with `causal=False` every pair."""

    supports_documents = True
    supports_bidirectional = True
    sparse = False

    block_size: BlockSize = 128

    def select(self, q, k, context):
        import jax.numpy as jnp

        from mtraining_jax.selection.context import Selection
        from pallas_kernels.index import DenseIndex

        if not context.documents.packed:
            return Selection(DenseIndex(self.block_size, context.causal))
        shape = q.shape[0], q.shape[2], context.num_blocks
        first, end = (jnp.broadcast_to(x[:, None], shape) for x in context.documents.spans())
        return Selection(DenseIndex(self.block_size, first=first, end=end))

    def describe(self) -> str:
        return "dense"


@options
class SlidingWindow(Pattern):
    """The last keys of each query, as in models with sliding-window attention."""

    supports_documents = True
    selects = False

    window: Window
    """Number of keys that a query sees, itself included (W)."""
    block_size: PositiveInt = 128

    def select(self, q, k, context):
        from mtraining_jax.selection.context import Selection
        from pallas_kernels.index import WindowIndex

        sizes = q.shape[0], q.shape[2], context.num_blocks, self.block_size
        window = min(self.window, context.num_blocks * self.block_size)
        index = WindowIndex.of_sequence(*sizes, window)
        if not context.documents.packed:
            return Selection(index)
        return Selection(index.within_documents(*context.documents.spans(), context.block_ids))
