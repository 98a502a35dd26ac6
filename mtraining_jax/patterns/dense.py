"""Attention to all keys, or to those of a sliding window, computed by the same kernels."""

import jax.numpy as jnp
from jax import Array

from mtraining_jax.patterns.base import Pattern
from mtraining_jax.patterns.options.base import DenseOptions
from mtraining_jax.selection.context import Selection, SelectionContext
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.limits import PositiveInt, Window
from pallas_kernels.index import DenseIndex, WindowIndex


@options
class Dense(Pattern, DenseOptions):
    """Every causal pair (of each document); with `causal=False` every pair."""

    supports_bidirectional = True

    def select(self, q: Array, k: Array, context: SelectionContext) -> Selection:
        if not context.documents.packed:
            return Selection(DenseIndex(self.block_size, context.causal))
        shape = q.shape[0], q.shape[2], context.num_blocks
        first, end = (jnp.broadcast_to(x[:, None], shape) for x in context.documents.spans())
        return Selection(DenseIndex(self.block_size, first=first, end=end))


@options
class SlidingWindow(Pattern):
    """The last keys of each query, as in models with sliding-window attention."""

    supports_documents = True
    selects = False

    window: Window
    """Number of keys that a query sees, itself included (W)."""
    block_size: PositiveInt = 128

    def select(self, q: Array, k: Array, context: SelectionContext) -> Selection:
        sizes = q.shape[0], q.shape[2], context.num_blocks, self.block_size
        window = min(self.window, context.num_blocks * self.block_size)
        index = WindowIndex.of_sequence(*sizes, window)
        if not context.documents.packed:
            return Selection(index)
        return Selection(index.within_documents(*context.documents.spans(), context.block_ids))
