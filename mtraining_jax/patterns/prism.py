"""Prism: key blocks by pooled queries and keys, in a high and a low rotary frequency band."""

import dataclasses
from typing import TYPE_CHECKING

from mtraining_jax.patterns.row_pattern import RowPattern
from mtraining_jax.selection.context import SelectionContext

if TYPE_CHECKING:
    from jax import Array

# Fractions of the rotary pairs, highest frequencies first: 64 and 96 of 128 components.
_HIGH, _LOW = 1 / 2, 3 / 4


@dataclasses.dataclass(frozen=True)
class Prism(RowPattern):
    """Key blocks by the attention of block means, in two bands of rotary frequencies.

    Means over a block lose what rotates fast within it. Blocks are therefore selected twice, by the
    first half of the rotary pairs and by the last three quarters, and the union is computed. With
    X_z the means of band z, of d_z components, the weights of a row are
    softmax(Q_z K_z^T / (t_z sqrt(d_z))) with
    t_z = sqrt(d_z / D) rms(Q_z) rms(K_z) / (rms(Q) rms(K)), which scales the logits of each band to
    those of all components together. Costs about 1/`block_size`^2 of a dense forward pass.

    Source: Prism (arXiv 2602.08426), written from the paper. Differences: the paper's rms is over
    the whole sequence; here it is over the row's own queries and over the keys up to them, so that
    no later token affects the selection. The paper has separate thresholds for the two bands; here
    `tau` is used for both. Rotary embeddings must rotate component i of a head with component
    i + D/2, as in Hugging Face models.
    """

    def keep(self, q: "Array", k: "Array", context: SelectionContext) -> "Array":
        from mtraining_jax.selection.rules.row_rule import kept_blocks

        rule = self.rule(context)
        high, low = (
            kept_blocks(scores, context.block_ids, rule, context.documents)
            for scores in self.bands(q, k, context)
        )
        return high | low

    def bands(self, q: "Array", k: "Array", context: SelectionContext) -> tuple["Array", "Array"]:
        """Returns the weights of the high and the low band, in the form of `RowPattern.scores`."""
        import jax.numpy as jnp

        from mtraining_jax.selection.scores import pooling, row_scores

        blocks = jnp.arange(context.num_blocks, dtype=jnp.int32)
        ends = context.ends(context.block_ids, self.block_size)
        queries = pooling.block_means(q, context.block_ids, ends)
        keys = pooling.block_means(k, blocks, context.ends(blocks, self.block_size))
        places, first = context.block_ids, context.first_blocks(blocks)
        own_first = context.first_blocks(context.block_ids)
        if ends is not None:
            places = jnp.where(places * self.block_size < ends, places, -1)
        head_dim, groups = q.shape[-1], q.shape[2] // k.shape[2]
        half = head_dim // 2
        in_pair = jnp.arange(head_dim) % half
        found = []
        for band in (in_pair < round(_HIGH * half), in_pair >= half - round(_LOW * half)):
            of_queries = pooling.energy_share(queries, band)
            of_keys = pooling.energy_share_up_to_each(keys, band, first)[:, :, context.block_ids]
            shares = of_queries * jnp.repeat(of_keys, groups, axis=1)
            # The temperature already contains sqrt(d_z), through the shares.
            rows = jnp.where(band, queries, 0.0) / jnp.maximum(shares, 1e-30)[..., None]
            found.append(
                row_scores.block_masses(
                    rows[:, :, :, None],
                    keys[:, :, :, None],
                    places[..., None],
                    own_first,
                    scale=context.scale_for(head_dim),
                    like=q,
                    backend="xla",  # two products per 128^2 pairs, in fp32
                )
            )
        return tuple(found)

    def scoring_share(self) -> float:
        # 1/g^2: one product of two bands per pair of blocks.
        return 1 / self.block_size**2

    def describe(self) -> str:
        return f"Prism, {self.rule_in_words()}, in each of two frequency bands"
