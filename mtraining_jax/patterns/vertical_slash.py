"""Dynamic vertical-slash: the columns and diagonals with most of the attention mass."""

import jax.numpy as jnp
from jax import Array

from mtraining_jax.patterns.options.probes import VerticalSlashOptions
from mtraining_jax.patterns.probe_pattern import ProbePattern
from mtraining_jax.selection.rules import top_p
from mtraining_jax.selection.scores.estimate import MASS_ONE
from mtraining_jax.selection.scores.last_queries import Probed, per_kind
from mtraining_jax.selection.spans import Spans
from mtraining_jax.utils.fields import options


@options
class VerticalSlash(ProbePattern, VerticalSlashOptions):
    """Top-p selection: per head, the heaviest columns and diagonals until their mass reaches p.

    Two presets select columns and diagonals separately, and differ at the edges:

    - ``safe``: the entry that crosses p is kept, and the first `sink_tokens` columns, the nearest
      `local_blocks` block diagonals and a minimum number of columns and diagonals are always kept.
      No row of the attention matrix is ever empty.
    - ``paper``: counts as the reference implementation. The entry that crosses p is dropped, and
      nothing is forced, with two exceptions. First, as in the reference, the padding of a slash
      list that is not full selects the main block diagonal. With a full list nothing is forced, and
      rows may be empty. Second, unlike the reference, a head whose first column alone crosses p
      keeps that column. The reference leaves such a head without columns, which costs more than a
      nat of loss. `saved_heads` reports the fraction of such heads.

    Source: MTraining (arXiv 2510.18830), vertical-slash.
    """

    def keys(self, probed: Probed) -> tuple[Array, top_p.Rule]:
        """Returns keys with the mass in the low 30 bits; bit 30 is set if forced."""
        spans, safe = probed.spans, self.preset == "safe"
        # One unit less than the total mass, which leaves bit 30 to forced entries.
        keys = jnp.minimum(probed.by_distance, MASS_ONE - 1).astype(jnp.uint32)
        # A head without columns is ruined: a model of 270 heads lost 0.7 to 1.7 nats from three.
        minimum = min(1, self.max_verticals), 0
        if safe:
            minimum = max(self.min_verticals, self.sink_tokens), self.min_slashes
            sinks = spans.spread(jnp.minimum(self.sink_tokens, spans.tokens))
            forced = spans.entries(keys.shape[-1]) < sinks[..., None]
            keys = keys.at[0].add(jnp.where(forced, jnp.uint32(MASS_ONE), 0))
        target = round(self.top_p * MASS_ONE)
        if probed.mass_fraction is not None:
            target = probed.mass_fraction
        maximum = self.most_columns(spans), self.max_slashes
        return keys, top_p.Rule(
            minimum=jnp.minimum(per_kind(*minimum), spans.tokens),
            maximum=jnp.minimum(per_kind(*maximum), spans.tokens),
            mass_target=target,
            mass_mask=MASS_ONE - 1,
            keep_crossing=safe,
        )

    def nearest(self, slash_count: Array, spans: Spans) -> int | Array:
        if self.preset == "safe":
            return self.local_blocks
        # The reference implementation pads short lists with -1, which selects the main diagonal.
        return (slash_count < jnp.minimum(self.max_slashes, spans.tokens)).astype(jnp.int32)

    def statistics(self, saved: Array) -> dict[str, Array]:
        return {"saved_heads": saved} if self.preset == "paper" else {}
