"""AdaSpa: key blocks by exact attention mass, for non-causal denoising models."""

from typing import Annotated

from mtraining_jax.patterns.base import Pattern
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.limits import Ge, Lt, NonNegativeInt, PositiveInt

# A head that keeps more than this fraction of its mass at the given sparsity can be made sparser.
_ENOUGH = 0.8


@options
class AdaSpa(Pattern):
    """Per head and query block, the key blocks with the largest exact attention mass; not causal.

    The mass of a block is the sum of the softmax of all queries of the row over all keys. All rows
    of blocks of a head keep the same number of blocks. With s = `sparsity`, let n be the number of
    heads that keep more than 0.8 of their mass at s, at most half of them. The n heads that keep
    most get sparsity (1 + s) / 2, the n that keep least get (3 s - 1) / 2, the others s, so the
    mean is unchanged. Ties go to the smaller block or head.

    A search costs half of a dense forward pass, so reuse its index: the steps of a denoiser share
    one input, and adjacent steps attend similarly. Search at some steps with
    `return_residuals=True` and pass the index as pattern in the steps between
    (`examples/dit_adaspa.py`). For `sparse_attention(..., causal=False)` on one device.

    Source: AdaSpa (arXiv 2502.21079). Its search takes two passes, and saves the first by reusing
    the log-sum-exp of an earlier step. Here one pass computes the exact masses of the step itself
    from the log-sum-exp of each block, so nothing is stored. The limit of n to half of the heads is
    not specified in the paper.
    """

    supports_bidirectional = True

    sparsity: Annotated[float, Ge(1 / 3), Lt(1)] = 0.8
    """Fraction of key blocks that each row skips (s). At least 1/3, so that no head gets a negative
    sparsity."""
    adaptive: bool = True
    """Vary the sparsity of heads as described above; false uses s for all heads."""
    first_blocks: NonNegativeInt = 0
    """Number of first key blocks (text) that are always kept, within the budget."""
    last_blocks: NonNegativeInt = 0
    """Number of last key blocks that are always kept, within the budget."""
    block_size: PositiveInt = 128
    """Block size in tokens (g)."""

    def select(self, q, k, context):
        """Selects lists for all rows and reports the fraction of mass kept as `recall`."""
        from mtraining_jax.selection.context import Selection
        from mtraining_jax.selection.scores.exact_masses import exact_masses, recall
        from pallas_kernels.index import BlockSparseIndex

        if context.causal or context.axis_names:
            raise ValueError(
                "AdaSpa needs causal=False and a sequence on one device; for causal attention use "
                "SampledRows(probe_queries_per_block=block_size), which selects by the same masses"
            )
        masses = exact_masses(q, k, context, self.block_size)
        kept = self.kept(masses)
        index = BlockSparseIndex.from_block_mask(kept, self.block_size, causal=False)
        return Selection(index, {"recall": recall(masses, kept)})

    def kept(self, masses):
        """Returns the blocks to keep, bool like `masses`, fp32 [B, Hq, NB, NB]."""
        import jax.numpy as jnp

        from mtraining_jax.selection.scores.exact_masses import largest, recall

        num_heads, num_blocks = masses.shape[1], masses.shape[-1]
        ends = self.first_blocks, self.last_blocks
        few, middle, many = (
            min(max(round((1 - level) * num_blocks), 1, sum(ends)), num_blocks)
            for level in ((1 + self.sparsity) / 2, self.sparsity, (3 * self.sparsity - 1) / 2)
        )
        kept = largest(masses, jnp.int32(middle), *ends)
        if not self.adaptive:
            return kept
        shares = recall(masses, kept)
        able = jnp.minimum((shares > _ENOUGH).sum(-1, keepdims=True), num_heads // 2)
        # Rank of each head, by descending mass kept.
        rank = jnp.argsort(jnp.argsort(-shares, axis=-1, stable=True), axis=-1)
        budgets = jnp.where(rank < able, few, jnp.where(rank >= num_heads - able, many, middle))
        return largest(masses, budgets[..., None], *ends)

    def describe(self) -> str:
        return f"AdaSpa, {100 * self.sparsity:g} % of the key blocks skipped"
