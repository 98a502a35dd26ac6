"""Replayed density: random indices of a given density, for speed measurements.

    python train.py --config qwen3b_512k --sparsity.kind=benchmarks.replay:Replay

With random weights attention is nearly uniform and top-p keeps everything, so a step says nothing
about the speed of a trained model. A replay computes as many pairs as a trained model would, on
random block diagonals and columns, or on random block lists. It does not select what matters.
"""

import dataclasses
import functools
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks import random_index
from benchmarks.random_index import MAX_DENSITY
from mtraining_jax.patterns.base import ModelSizes, Pattern, Traced
from mtraining_jax.patterns.sampled_rows import SampledRows
from mtraining_jax.patterns.vertical_slash import VerticalSlash
from mtraining_jax.patterns.xattention import XAttention
from mtraining_jax.selection.collectives import rows_of
from mtraining_jax.selection.context import Selection, SelectionContext
from mtraining_jax.selection.metrics import density
from mtraining_jax.tools.plan import pattern_costs
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.limits import (
    Ge,
    Gt,
    Le,
    Lt,
    NonNegativeInt,
    PositiveFraction,
    PositiveInt,
    UnitFraction,
)
from mtraining_jax.utils.random_bits import hash_uint32
from pallas_kernels.index import BlockMaskIndex, Index, VerticalSlashIndex

_DRAWN = "slash_blocks", "slash_count", "vertical_tokens", "vertical_count"  # of vertical_slash


@options
class Replay(VerticalSlash):
    """A fixed random index for every head, the same for all batches.

    `bind` draws the indices of all layers with the run's seed. The fields of the replayed pattern
    configure the selection that runs with it, for its time only.

    Lists per row of blocks have the first block, the nearest ones, and every other causal block
    with the head's probability, by a hash of the head's salt and the block's position. A rank
    computes the rows of its own blocks, and only two numbers per head are stored. Listed blocks are
    distributed uniformly; those of a trained model are more clustered.

    With documents, the pairs drawn for the whole sequence are restricted to its documents; lists
    have the first block of each. Their density within a document is therefore that of a window of
    its length, which is higher for short documents. The actual density is reported.
    """

    arrays: ClassVar[tuple[str, ...]] = (*_DRAWN, "thresholds", "salts")
    selects = False
    density_name = "replayed density, not chosen"

    replay_of: Literal["vertical_slash", "xattention", "sampled_rows"] = "vertical_slash"
    """Pattern to replay: block diagonals and columns of vertical_slash, or random lists per row of
    blocks of one of the others. With `replay_estimate` this pattern also selects."""
    replay_density: Annotated[float, Gt(0), Le(MAX_DENSITY)] = 0.063
    """Density to replay, mean over layers. Layers spread from 0.06 to 2 times this value, as in the
    MTraining paper: 0.4 % to 12.7 % around 6.3 %."""
    replay_estimate: bool = True
    """Also select an index in every layer, so that a step includes selection cost."""
    tau: PositiveFraction = 0.9
    """As in the replayed pattern."""
    sink_blocks: NonNegativeInt = 1
    """As in the replayed pattern."""
    dense_prefix_tokens: NonNegativeInt = 0
    """As in the replayed pattern."""
    dense_suffix_tokens: NonNegativeInt | None = None
    """As in the replayed pattern."""
    min_block_mass: UnitFraction = 0.0
    """As in the replayed pattern."""
    random_block_prob: Annotated[float, Ge(0), Lt(1)] = 0.0
    """As in the replayed pattern."""
    stride: PositiveInt = 8
    """As in the replayed pattern."""
    probe_queries_per_block: PositiveInt = 16
    """As in the replayed pattern."""
    columns: NonNegativeInt = 0
    """As in the replayed pattern."""

    slash_blocks: Traced = None
    """int32 [Hq, max_slash_blocks], as in `VerticalSlashIndex`, like the next three."""
    slash_count: Traced = None
    """int32 [Hq]."""
    vertical_tokens: Traced = None
    """int32 [Hq, max_verticals]."""
    vertical_count: Traced = None
    """int32 [Hq]."""
    thresholds: Traced = None
    """uint32 [Hq], of lists: the probability of a block that is not forced, in 2^-32."""
    salts: Traced = None
    """uint32 [Hq], of lists: drawn with the run's seed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.replayed()  # validates the fields of the replayed pattern

    @property
    def of_lists(self) -> bool:
        """Whether random lists of blocks are replayed, else block diagonals and columns."""
        return self.replay_of != "vertical_slash"

    def replayed(self) -> Pattern:
        """Returns the replayed pattern, with the values of these fields."""
        kinds = {
            "vertical_slash": VerticalSlash,
            "xattention": XAttention,
            "sampled_rows": SampledRows,
        }
        kind: Any = kinds[self.replay_of]
        return kind(**{x.name: getattr(self, x.name) for x in dataclasses.fields(kind)})

    def bind(self, model: ModelSizes) -> "Replay":
        """Draws the indices of all layers, the same on every machine.

        Raises:
            UserError: if the density cannot be replayed with these options.
        """
        rng, shape = np.random.default_rng(model.seed), (model.num_layers, model.num_heads)
        num_blocks = model.seq_len // self.block_size
        if not self.of_lists:
            arrays = random_index.draw_vertical_slash(
                rng,
                self.replay_density,
                shape,
                num_blocks,
                self.block_size,
                max_verticals=self.max_verticals,
                max_slashes=self.max_slashes,
                capacities=self.list_capacities(num_blocks),
            )
            return dataclasses.replace(self, **dict(zip(_DRAWN, arrays, strict=True)))
        targets = random_index.draw_densities(rng, self.replay_density, *shape)
        forced = self.sink_blocks, self.local_blocks
        probabilities = random_index.list_probabilities(
            targets.reshape(-1), num_blocks, self.block_size, *forced
        )
        thresholds = np.minimum(np.round(probabilities * 2.0**32), 2.0**32 - 1)
        salts = np.random.default_rng(model.seed).integers(2**32, size=shape, dtype=np.uint32)
        thresholds = thresholds.astype(np.uint32).reshape(shape)
        return dataclasses.replace(self, thresholds=thresholds, salts=salts)

    def sharded_by_query(self, documents: bool) -> bool:
        return self.of_lists or documents

    def overridable(self) -> dict[str, int]:
        return {}

    def select(self, q: Array, k: Array, context: SelectionContext) -> Selection:
        """Returns the replayed index, and the density of the one that `replayed` selects."""
        selected, statistics = self._estimated(q, k, context)
        if self.of_lists:
            return Selection(self._lists(context, self._never(selected, q)), statistics)
        if context.documents.packed:
            index = self._within_documents(context, self._never(selected, q))
            return Selection(index, statistics)
        shape = (q.shape[0], *self.slash_count.shape)
        none = jnp.zeros(shape, jnp.int32)
        if selected is not None:
            # All entries of an index are at least 0, which the compiler does not know.
            lowest = (x.reshape(*shape, -1).min(-1, initial=0) for x in jax.tree.leaves(selected))
            none = jnp.minimum(functools.reduce(jnp.minimum, lowest), 0)

        def replayed(x: Any) -> Array:
            x = jnp.broadcast_to(x, (shape[0], *x.shape))
            return x + none.reshape(*shape, *[1] * (x.ndim - 2))

        leaves = (replayed(getattr(self, name)) for name in _DRAWN)
        index = VerticalSlashIndex(
            *leaves, block_size=self.block_size, num_blocks=context.num_blocks
        )
        return Selection(index, statistics)

    def _estimated(
        self, q: Array, k: Array, context: SelectionContext
    ) -> tuple[Index | None, dict[str, Array]]:
        """Selects an index if required, and returns it with the statistic of its density."""
        if not self.replay_estimate:
            return None, {}
        index = self.replayed().select(q, k, context).index
        rows = rows_of(context.block_ids, context.axis_names)
        share = density(index, context.num_blocks * index.block_size, rows, context.documents)
        return index, {"estimated_density": share.mean(dtype=jnp.float32)}

    def _never(self, index: Index | None, q: Array) -> Array:
        """Returns False, bool [B, Hq], but only after the index is known.

        An index that depends on it cannot be used before the estimate ends, as if the estimate
        were used. Counts are at least 0, which the compiler does not know.
        """
        if index is None:
            return jnp.zeros((q.shape[0], q.shape[2]), bool)
        return index.budgets()["blocks"] < 0

    def _within_documents(self, context: SelectionContext, never: Array) -> BlockMaskIndex:
        """Returns the drawn pairs, restricted to documents, as bits and marked columns."""
        rows, num_blocks, documents = context.block_ids, context.num_blocks, context.documents
        leaves = (getattr(self, name)[None] for name in _DRAWN)
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

    def _lists(self, context: SelectionContext, never: Array) -> BlockMaskIndex:
        """Returns the lists of the local rows of blocks."""
        num_blocks, documents = context.num_blocks, context.documents
        rows, blocks = context.block_ids[:, None], jnp.arange(num_blocks, dtype=jnp.int32)
        first = documents.of(context.block_ids).first[:, None, :, None]
        forced = (blocks - first < self.sink_blocks) | (rows - blocks < self.local_blocks)
        positions = (rows * num_blocks + blocks).astype(jnp.uint32)
        salts, thresholds = (x[:, None, None] for x in (self.salts, self.thresholds))
        listed = (forced | (hash_uint32(positions ^ salts) < thresholds)) ^ never[:, :, None, None]
        index = BlockMaskIndex.from_block_mask(listed, self.block_size, context.block_ids)
        if documents.packed:
            causal = documents.causal_blocks(context.block_ids, num_blocks)
            index = dataclasses.replace(index, bits=index.bits & causal)
        return index

    def expected_density(self, tokens: int) -> tuple[float, str]:
        del tokens
        return self.replay_density, self.density_name

    def selects_an_index(self) -> bool:
        return self.replay_estimate

    def scoring_share(self) -> float:
        return self.replay_estimate * pattern_costs.scoring_share(self.replayed())

    def softmax_share(self) -> float:
        return self.replay_estimate * pattern_costs.softmax_share(self.replayed())

    def scores_fp8_keys(self) -> bool:
        return self.replay_estimate and pattern_costs.scores_fp8_keys(self.replayed())

    def capacities(self, num_blocks: int, documents: bool = False) -> tuple[int, int]:
        return pattern_costs.capacities(self.replayed(), num_blocks, documents)

    def describe(self) -> str:
        also = ", plus selection cost" if self.replay_estimate else ""
        what = "lists for each row of blocks" if self.of_lists else "block diagonals and columns"
        return (
            f"{self.density_name}: {self.replay_density:.1%} of the causal pairs, random {what}"
            f"{also}"
        )
