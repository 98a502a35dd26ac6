"""AdaSpa: key blocks by their exact mass, for models that denoise without a causal mask."""

import dataclasses
from typing import TYPE_CHECKING

from mtraining_jax.limits import check_limits, limited
from mtraining_jax.sparsity.pattern import Choice, Pattern, Shards

if TYPE_CHECKING:
    from jax import Array

# A head that keeps more than this share of its mass at the given sparsity can give some away.
_ENOUGH = 0.8


@dataclasses.dataclass(frozen=True)
class AdaSpa(Pattern):
    """Per head and block of queries, the key blocks of largest exact attention mass; not causal.

    The mass of a block is the sum of the softmax of all queries of the row over all keys. Every
    row of blocks of a head keeps equally many. With s = `sparsity`, let n be the number of heads
    that keep more than 0.8 of their mass at s, at most half of them: the n that keep most get
    sparsity (1 + s) / 2, the n that keep least (3 s - 1) / 2, the others s. The mean stays. Of
    equal masses the smaller block or head comes first.

    A search costs half of a dense forward pass, so it pays where its index is used again: the
    steps of a denoiser share one input, and neighbouring ones attend alike. Search at some steps
    with `return_index=True`, and give the index to the steps between as their pattern
    (`examples/dit_adaspa.py`). For `sparse_attention(..., causal=False)` on one device.

    Source: AdaSpa (arXiv 2502.21079). There a search takes two passes, of which a log-sum-exp kept
    from an earlier step saves the first. Here one pass gives exact masses of the step itself, by
    the log-sum-exp of each block, so nothing is kept. What the paper leaves open: n is at most
    half of the heads.

    Attributes:
        sparsity: s, share of the key blocks that a row leaves out, from 1/3 so that no head gets
            less than nothing.
        adaptive: whether heads differ as above; otherwise all have sparsity s.
        first_blocks: first key blocks, which are always kept and count among the others: text.
        last_blocks: last key blocks, likewise.
        block_size: g, tokens on a side of a block.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    also_not_causal = True

    sparsity: limited(float, ge=1 / 3, lt=1) = 0.8
    adaptive: bool = True
    first_blocks: limited(int, ge=0) = 0
    last_blocks: limited(int, ge=0) = 0
    block_size: limited(int, ge=1) = 128

    def __post_init__(self) -> None:
        check_limits(self)

    def choose(self, q: "Array", k: "Array", shards: Shards) -> Choice:
        """Chooses lists for all rows, and reports the share of the mass that they keep, `recall`.

        Raises:
            ValueError: if attention is causal, or the sequence is sharded.
        """
        from pallas_kernels.index import BlockSparseIndex

        if shards.causal or shards.axis_names:
            raise ValueError(
                "AdaSpa needs causal=False and a sequence on one device; for causal attention "
                "ExactRows chooses by the same masses"
            )
        masses = exact_masses(q, k, shards, self.block_size)
        kept = self.kept(masses)
        index = BlockSparseIndex.from_block_mask(kept, self.block_size, causal=False)
        return Choice(index, {"recall": recall(masses, kept)})

    def kept(self, masses: "Array") -> "Array":
        """The key blocks that each row of blocks keeps: bool [B, Hq, NB, NB].

        Args:
            masses: fp32 [B, Hq, NB, NB], from `exact_masses`.
        """
        import jax.numpy as jnp

        num_heads, num_blocks = masses.shape[1], masses.shape[-1]
        counts = [
            max(round((1 - level) * num_blocks), 1, self.first_blocks + self.last_blocks)
            for level in (
                (1 + self.sparsity) / 2, self.sparsity, (3 * self.sparsity - 1) / 2
            )
        ]
        few, middle, many = (jnp.int32(min(count, num_blocks)) for count in counts)
        kept = self._largest(masses, middle)
        if not self.adaptive:
            return kept
        shares = recall(masses, kept)
        able = jnp.minimum((shares > _ENOUGH).sum(-1, keepdims=True), num_heads // 2)
        # The rank of each head, the one that keeps most first.
        rank = jnp.argsort(jnp.argsort(-shares, axis=-1, stable=True), axis=-1)
        of_heads = jnp.where(rank < able, few, jnp.where(rank >= num_heads - able, many, middle))
        return self._largest(masses, of_heads[..., None])

    def _largest(self, masses: "Array", count: "Array") -> "Array":
        """The blocks of largest mass of each row, forced ones first."""
        import jax.numpy as jnp

        from mtraining_jax.sparsity import select

        blocks = jnp.arange(masses.shape[-1], dtype=jnp.int32)
        forced = (blocks < self.first_blocks) | (blocks >= masses.shape[-1] - self.last_blocks)
        keys = jnp.where(forced, jnp.inf, masses)
        keys = select.float_keys(keys)[..., None]
        return select.kept_entries(keys, select.Rule(minimum=0, maximum=count))[0][..., 0]

    def describe(self) -> str:
        """Its name and sparsity."""
        return f"AdaSpa, {self.sparsity:g} of the blocks left out"

    def expected_density(self, tokens: int) -> tuple[float, str]:
        """1 - s."""
        return 1 - self.sparsity, "the share that it keeps"

    def scoring_share(self) -> float:
        """One of a forward pass's two products."""
        return 0.5

    def softmax_share(self) -> float:
        """All of them."""
        return 1.0


def exact_masses(q: "Array", k: "Array", shards: Shards, block_size: int) -> "Array":
    """Softmax mass that each block of queries gives to each key block, mean over its queries.

    Args:
        q: [B, S, Hq, D].
        k: [B, S, Hk, D].
        shards: of the whole sequence on one device; its `scale` and `backend` are read.
        block_size: g.

    Returns:
        fp32 [B, Hq, S/g, S/g], multiples of 2^-30; a row adds up to 1, up to rounding.
    """
    import jax.numpy as jnp

    from mtraining_jax.sparsity import row_scores

    def blocks(x: "Array") -> "Array":  # [B, S, H, D] -> [B, H, S/g, g, D]
        return x.reshape(x.shape[0], -1, block_size, *x.shape[2:]).transpose(0, 3, 1, 2, 4)

    places = jnp.full((q.shape[1] // block_size, block_size), k.shape[1] - 1, jnp.int32)
    return row_scores.block_masses(
        blocks(q), blocks(k), places, scale=shards.scale_for(q.shape[-1]), like=q,
        backend=shards.backend,
    )


def recall(masses: "Array", kept: "Array") -> "Array":
    """Share of the mass that lies on kept blocks: fp32 [B, Hq].

    Args:
        masses: fp32 [B, Hq, NB, NB], from `exact_masses`.
        kept: bool, like them.
    """
    import jax.numpy as jnp

    return jnp.where(kept, masses, 0.0).sum((-2, -1)) / masses.sum((-2, -1))
