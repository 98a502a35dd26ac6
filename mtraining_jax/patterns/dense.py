"""Dense attention, computed by the same kernels."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from mtraining_jax.patterns.base import Pattern
from mtraining_jax.patterns.options.base import DenseOptions
from mtraining_jax.selection.context import Selection, SelectionContext
from pallas_kernels.index import DenseIndex


@dataclasses.dataclass(frozen=True)
class Dense(Pattern, DenseOptions):
    """Every causal pair (of each document); with `causal=False` every pair."""

    supports_bidirectional = True

    def select(self, q: Array, k: Array, context: SelectionContext) -> Selection:
        if not context.documents.packed:
            return Selection(DenseIndex(self.block_size, context.causal))
        shape = q.shape[0], q.shape[2], context.num_blocks
        first, end = (jnp.broadcast_to(x[:, None], shape) for x in context.documents.spans())
        return Selection(DenseIndex(self.block_size, first=first, end=end))
