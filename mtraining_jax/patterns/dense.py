"""Dense attention, computed by the same kernels."""

import dataclasses
from typing import TYPE_CHECKING

from mtraining_jax.patterns.base import Pattern
from mtraining_jax.selection.context import Selection, SelectionContext
from mtraining_jax.utils.limits import PositiveInt, check_limits

if TYPE_CHECKING:
    from jax import Array


@dataclasses.dataclass(frozen=True)
class Dense(Pattern):
    """Every causal pair (of each document); with `causal=False` every pair.

    Attributes:
        block_size: Block size in tokens (g).
    """

    also_not_causal = True
    reads_documents = True
    sparse = False

    block_size: PositiveInt = 128

    def __post_init__(self) -> None:
        check_limits(self)

    def select(self, q: "Array", k: "Array", context: SelectionContext) -> Selection:
        import jax.numpy as jnp

        from pallas_kernels.index import DenseDocumentsIndex, DenseIndex

        if context.documents is None:
            return Selection(DenseIndex(self.block_size, context.causal))
        shape = q.shape[0], q.shape[2], context.num_blocks
        first, end = (jnp.broadcast_to(x[:, None], shape) for x in context.documents.spans())
        return Selection(DenseDocumentsIndex(first, end, self.block_size))

    def describe(self) -> str:
        return "dense"

    def expected_density(self, tokens: int) -> tuple[float, str]:
        return 1.0, "dense"

    def capacities(self, num_blocks: int, documents: bool = False) -> tuple[int, int]:
        # Beginning and end of each block's document.
        return 2 * num_blocks if documents else 0, 0
