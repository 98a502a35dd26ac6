"""Replayed density for packed documents: the same pairs, restricted to documents."""

import dataclasses
from typing import TYPE_CHECKING

from mtraining_jax.sparsity.pattern import Choice, ModelSizes, Pattern, Shards
from mtraining_jax.sparsity.replay import Replay, ReplaySettings

if TYPE_CHECKING:
    from jax import Array


@dataclasses.dataclass(frozen=True)
class DocumentReplaySettings(ReplaySettings):
    """`ReplaySettings` for packed sequences.

    Diagonals, columns and lists are drawn for the whole sequence and restricted to its documents.
    The density within a document is therefore that of a window of its length, which is higher for
    short documents: every head has a few diagonals near the main one. The actual density is
    reported.
    """

    @property
    def by_rows(self) -> bool:
        return True

    def for_documents(self) -> "DocumentReplaySettings":
        return self

    def pattern(self, model: ModelSizes) -> Pattern:
        return super().pattern(model).for_documents()

    def capacities(self, num_blocks: int) -> tuple[int, int]:
        # Those of the replayed pattern, for documents.
        return self._like().for_documents().capacities(num_blocks)


@dataclasses.dataclass(frozen=True)
class DocumentReplay(Replay):
    """The index of every head of `Replay`, restricted to documents, as bits and marked columns."""

    by_rows = True

    def for_documents(self) -> "DocumentReplay":
        return self

    def choose(self, q: "Array", k: "Array", shards: Shards) -> Choice:
        """Returns the replayed index, and the density of the one selected by `estimate`.

        The replayed index depends on the selected one as in `Replay.choose`.
        """
        import jax.numpy as jnp

        from mtraining_jax.sparsity.exchange import rows_of
        from mtraining_jax.sparsity.metrics import density
        from pallas_kernels.index import BlockMaskIndex, VerticalSlashIndex

        rows, num_blocks, documents = shards.block_ids, shards.num_blocks, shards.documents
        statistics, never = {}, jnp.zeros((q.shape[0], q.shape[2]), bool)
        if self.estimate is not None:
            chosen = self.estimate.for_documents().choose(q, k, shards).index
            held = rows_of(rows, shards.axis_names)
            share = density(chosen, num_blocks * self.block_size, held, documents)
            statistics["estimated_density"] = share.mean(dtype=jnp.float32)
            # A count is at least 0, which the compiler does not know.
            never = chosen.budgets()["blocks"] < 0
        leaves = (getattr(self, name)[None] for name in self.arrays)
        drawn = VerticalSlashIndex(*leaves, block_size=self.block_size)
        diagonals = drawn.active_diagonals(num_blocks)  # [1, Hq, NB]
        distance = rows[:, None] - jnp.arange(num_blocks, dtype=jnp.int32)
        listed = diagonals[:, :, jnp.maximum(distance, 0)] ^ never[:, :, None, None]
        index = BlockMaskIndex.from_block_mask(listed, self.block_size, rows)
        if drawn.vertical_tokens.shape[-1]:
            tokens = jnp.broadcast_to(
                drawn.vertical_tokens, (q.shape[0], *drawn.vertical_tokens.shape[1:])
            )
            index = index.with_columns(tokens, rows)
        return Choice(index.within_documents(*documents.spans(), rows), statistics)
