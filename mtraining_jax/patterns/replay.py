"""Replayed density: random indices of a given density, for speed measurements.

With random weights attention is nearly uniform and top-p keeps everything, so a step says nothing
about the speed of a trained model. A replay computes as many pairs as a trained model would, on
random block diagonals and columns, or on random block lists. It does not select what matters.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mtraining_jax.patterns.base import Pattern, Traced
from mtraining_jax.patterns.options.base import ModelSizes, PatternOptions
from mtraining_jax.patterns.options.probes import ReplayOptions
from mtraining_jax.selection import random_index
from mtraining_jax.selection.collectives import rows_of
from mtraining_jax.selection.context import Selection, SelectionContext
from mtraining_jax.selection.metrics import density
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.random_bits import hash_uint32
from pallas_kernels.index import BlockMaskIndex, Index, VerticalSlashIndex


class ReplayPattern(Pattern):
    """A fixed index for every head, the same for all batches; a pytree.

    Layers can be stacked, each array with a leading axis [L], and scanned over.

    Attributes:
        estimate: pattern that selects an index before the replayed one is used, so that a step
            includes selection cost; None to skip.
    """

    supports_documents = True
    selects = False
    density_name = ReplayOptions.density_name

    estimate: Pattern | None

    def estimated(
        self, q: Array, k: Array, context: SelectionContext
    ) -> tuple[Index | None, dict[str, Array]]:
        """Selects an index with `estimate`, and returns it with the statistic of its density."""
        if self.estimate is None:
            return None, {}
        index = self.estimate.select(q, k, context).index
        rows = rows_of(context.block_ids, context.axis_names)
        share = density(index, context.num_blocks * index.block_size, rows, context.documents)
        return index, {"estimated_density": share.mean(dtype=jnp.float32)}

    def after(self, index: Index | None, q: Array) -> Array:
        """Returns False, bool [B, Hq], but only after the index is known.

        An index that depends on it cannot be used before the estimate ends, as if the estimate
        were used. Counts are at least 0, which the compiler does not know.
        """
        if index is None:
            return jnp.zeros((q.shape[0], q.shape[2]), bool)
        return index.budgets()["blocks"] < 0


@options
class Replay(ReplayPattern):
    """Random block diagonals and columns."""

    arrays = ("slash_blocks", "slash_count", "vertical_tokens", "vertical_count")

    slash_blocks: Traced
    """int32 [Hq, max_slash_blocks], as in `VerticalSlashIndex`, like the next three."""
    slash_count: Traced
    """int32 [Hq]."""
    vertical_tokens: Traced
    """int32 [Hq, max_verticals]."""
    vertical_count: Traced
    """int32 [Hq]."""
    estimate: Pattern | None
    """As in `ReplayPattern`."""
    block_size: int
    """Tokens per block."""

    @classmethod
    def from_options(cls, options: PatternOptions, model: ModelSizes) -> Pattern:
        """Draws the indices of all layers with the run's seed, the same on every machine.

        Raises:
            UserError: if the density cannot be replayed with these options.
        """
        assert isinstance(options, ReplayOptions)
        estimate = options.replayed().pattern(model) if options.replay_estimate else None
        kind = ReplayLists if options.of_lists else cls
        return kind.drawn(options, model, estimate)

    @classmethod
    def drawn(cls, options: ReplayOptions, model: ModelSizes, estimate: Pattern | None) -> "Replay":
        num_blocks = model.seq_len // options.block_size
        arrays = random_index.draw_vertical_slash(
            np.random.default_rng(model.seed),
            options.replay_density,
            (model.num_layers, model.num_heads),
            num_blocks,
            options.block_size,
            max_verticals=options.max_verticals,
            max_slashes=options.max_slashes,
            capacities=options.list_capacities(num_blocks),
        )
        leaves: Any = dict(zip(cls.arrays, arrays, strict=True))
        return cls(**leaves, estimate=estimate, block_size=options.block_size)

    def row_sharded(self, documents: bool) -> bool:
        return documents

    def select(self, q: Array, k: Array, context: SelectionContext) -> Selection:
        """Returns the replayed index, and the density of the one selected by `estimate`."""
        selected, statistics = self.estimated(q, k, context)
        if context.documents.packed:
            never = self.after(selected, q)
            return Selection(self._within_documents(context, never), statistics)
        shape = (q.shape[0], *self.slash_count.shape)
        none = jnp.zeros(shape, jnp.int32)
        if selected is not None:
            # All entries of an index are at least 0, which the compiler does not know.
            lowest = (x.reshape(*shape, -1).min(-1, initial=0) for x in jax.tree.leaves(selected))
            none = jnp.minimum(functools.reduce(jnp.minimum, lowest), 0)

        def replayed(x: Any) -> Array:
            x = jnp.broadcast_to(x, (shape[0], *x.shape))
            return x + none.reshape(*shape, *[1] * (x.ndim - 2))

        leaves = (replayed(getattr(self, name)) for name in self.arrays)
        index = VerticalSlashIndex(
            *leaves, block_size=self.block_size, num_blocks=context.num_blocks
        )
        return Selection(index, statistics)

    def _within_documents(self, context: SelectionContext, never: Array) -> BlockMaskIndex:
        """Returns the same pairs, restricted to documents, as bits and marked columns."""
        rows, num_blocks, documents = context.block_ids, context.num_blocks, context.documents
        assert documents.packed
        leaves = (getattr(self, name)[None] for name in self.arrays)
        drawn = VerticalSlashIndex(*leaves, block_size=self.block_size)
        diagonals = drawn.active_diagonals(num_blocks)  # [1, Hq, NB]
        distance = rows[:, None] - jnp.arange(num_blocks, dtype=jnp.int32)
        listed = diagonals[:, :, jnp.maximum(distance, 0)] ^ never[:, :, None, None]
        index = BlockMaskIndex.from_block_mask(listed, self.block_size, rows)
        if drawn.vertical_tokens.shape[-1]:
            tokens = drawn.vertical_tokens
            tokens = jnp.broadcast_to(tokens, (never.shape[0], *tokens.shape[1:]))
            index = index.with_columns(tokens, rows)
        return index.within_documents(*documents.spans(), rows)


@options
class ReplayLists(ReplayPattern):
    """A random list of key blocks per row of blocks.

    The first block and the nearest ones are always listed, every other causal block with the
    head's probability, by a hash of the head's salt and the block's position. A rank computes the
    rows of its own blocks, and only two numbers per head are stored. Listed blocks are distributed
    uniformly; those of a trained model are more clustered. In packed sequences, each document has
    its own first block, and blocks of other documents are not listed.
    """

    arrays = ("thresholds", "salts")

    thresholds: Traced
    """uint32 [Hq], the probability of a block that is not forced, in 2^-32."""
    salts: Traced
    """uint32 [Hq], drawn with the run's seed."""
    estimate: Pattern | None
    """As in `ReplayPattern`."""
    sink_blocks: int
    """Number of first blocks, always listed."""
    local_blocks: int
    """Number of nearest blocks, always listed, including a row's own."""
    block_size: int
    """Tokens per block."""

    @classmethod
    def drawn(
        cls, options: ReplayOptions, model: ModelSizes, estimate: Pattern | None
    ) -> "ReplayLists":
        shape = model.num_layers, model.num_heads
        targets = random_index.draw_densities(
            np.random.default_rng(model.seed), options.replay_density, *shape
        )
        num_blocks = model.seq_len // options.block_size
        forced = options.sink_blocks, options.local_blocks
        probabilities = random_index.list_probabilities(
            targets.reshape(-1), num_blocks, options.block_size, *forced
        )
        thresholds = np.minimum(np.round(probabilities * 2.0**32), 2.0**32 - 1)
        salts = np.random.default_rng(model.seed).integers(2**32, size=shape, dtype=np.uint32)
        thresholds = thresholds.astype(np.uint32).reshape(shape)
        return cls(
            thresholds=thresholds,
            salts=salts,
            estimate=estimate,
            sink_blocks=options.sink_blocks,
            local_blocks=options.local_blocks,
            block_size=options.block_size,
        )

    def row_sharded(self, documents: bool) -> bool:
        return True

    def select(self, q: Array, k: Array, context: SelectionContext) -> Selection:
        """Returns the replayed lists, and the density of the index selected by `estimate`."""
        num_blocks = context.num_blocks
        selected, statistics = self.estimated(q, k, context)
        never = self.after(selected, q)
        rows, blocks = context.block_ids[:, None], jnp.arange(num_blocks, dtype=jnp.int32)
        documents = context.documents
        first = documents.of(context.block_ids).first[:, None, :, None]
        forced = (blocks - first < self.sink_blocks) | (rows - blocks < self.local_blocks)
        positions = (rows * num_blocks + blocks).astype(jnp.uint32)
        salts, thresholds = (x[:, None, None] for x in (self.salts, self.thresholds))
        listed = (forced | (hash_uint32(positions ^ salts) < thresholds)) ^ never[:, :, None, None]
        index = BlockMaskIndex.from_block_mask(listed, self.block_size, context.block_ids)
        if documents.packed:
            causal = documents.causal_blocks(context.block_ids, num_blocks)
            index = dataclasses.replace(index, bits=index.bits & causal)
        return Selection(index, statistics)
