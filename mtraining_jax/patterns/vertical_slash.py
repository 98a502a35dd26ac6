"""Dynamic vertical-slash: the columns and diagonals with most of the attention mass."""

import dataclasses
from typing import TYPE_CHECKING, Literal

from mtraining_jax.patterns.base import KeptShare, Settings
from mtraining_jax.patterns.probe_pattern import ProbePattern
from mtraining_jax.utils.limits import (
    NonNegativeInt,
    PositiveFraction,
    PositiveInt,
    UnitFraction,
    check_at_most,
    check_limits,
)

if TYPE_CHECKING:
    from jax import Array

    from mtraining_jax.selection.rules import top_p
    from mtraining_jax.selection.scores.last_queries import Kept, Probed
    from mtraining_jax.selection.spans import Spans


@dataclasses.dataclass(frozen=True)
class VerticalSlashSettings(Settings):
    """The fields of `VerticalSlash`, documented there."""

    top_p: PositiveFraction = 0.90
    max_verticals: NonNegativeInt = 4096
    max_slashes: NonNegativeInt = 4096
    preset: Literal["safe", "paper", "joint"] = "safe"
    num_probe_queries: PositiveInt = 64
    block_size: PositiveInt = 128
    sink_tokens: NonNegativeInt = 30
    local_blocks: PositiveInt = 2
    min_verticals: NonNegativeInt = 128
    min_slashes: NonNegativeInt = 16
    min_block_mass: UnitFraction = 0.0
    max_density: PositiveFraction = 1.0
    local_fraction: UnitFraction = 0.0

    def __post_init__(self) -> None:
        check_limits(self)
        check_at_most(self, "num_probe_queries", "block_size")
        if self.preset != "paper":
            check_at_most(self, "sink_tokens", "max_verticals")
        if self.preset == "safe":
            check_at_most(self, "min_verticals", "max_verticals")
            check_at_most(self, "min_slashes", "max_slashes")

    def more_pairs(self) -> str:
        return f"increase sparsity.top_p = {self.top_p}"

    def expected_density(self, tokens: int) -> tuple[float, str]:
        density, why = super().expected_density(tokens)
        return min(density, self.max_density), why


@dataclasses.dataclass(frozen=True)
class VerticalSlash(VerticalSlashSettings, ProbePattern):
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
      nat of loss.

    The third preset selects them jointly (`joint_rule`):

    - ``joint``: columns and block diagonals by the mass that they gain per computed pair, until
      their joint mass reaches p. The same entries are forced as in ``safe``, except for the minimum
      numbers.

    Source: MTraining (arXiv 2510.18830), vertical-slash.

    Attributes:
        top_p: Attention mass to keep, as a fraction of the estimated mass: of verticals and of
            slashes separately (presets safe, paper) or of both together (joint).
        max_verticals: Maximum number of verticals (key columns) per head.
        max_slashes: Maximum number of slashes (diagonals) per head (presets safe, paper). Each
            selects at most two block diagonals.
        preset: safe always keeps sinks, local blocks and minimum budgets; paper keeps only what
            top_p selects; joint selects verticals and slashes together.
        num_probe_queries: Number of probe queries at the end of the sequence; at most block_size.
        block_size: Block size in tokens (g).
        sink_tokens: Number of first tokens that are always kept as verticals (presets safe, joint).
        local_blocks: Number of nearest key blocks (block diagonals) that are always kept, including
            the query's own (vertical_slash: presets safe, joint).
        min_verticals: Minimum number of verticals per head (preset safe). One tile of columns is
            nearly free.
        min_slashes: Minimum number of slashes per head (preset safe). Small, since each isolated
            slash may cost two block diagonals.
        min_block_mass: Minimum block mass, as a fraction of the row's mass: blocks below it are
            skipped even if tau or top_p is not reached (vertical_slash: preset joint). With tau or
            top_p 1 it is the only criterion, and heads with concentrated mass keep few blocks; 0
            disables.
        max_density: Maximum density of a head (preset joint). Forced pairs may exceed it.
        local_fraction: Fraction of max_density reserved for a local window (preset joint): as many
            nearest block diagonals as fit together with the sinks, if more than local_blocks. With
            1 the rest has room for less than one diagonal.
        min_sparse_tokens: Documents shorter than this, including padding, use dense attention, since
            selection would save little. Has no effect without documents.
    """

    min_sparse_tokens: NonNegativeInt = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, unused in (
            ("min_block_mass", 0.0),
            ("max_density", 1.0),
            ("local_fraction", 0.0),
        ):
            if self.preset != "joint" and getattr(self, name) != unused:
                raise ValueError(
                    f"{name}={getattr(self, name)} is an option of preset='joint', but preset is "
                    f"{self.preset!r}; set preset='joint' or {name}={unused:g}"
                )
        if self.local_fraction and self.max_density == 1:
            raise ValueError(
                f"local_fraction={self.local_fraction} is a fraction of max_density, which is 1; set "
                "max_density below 1"
            )

    def kept_share(self) -> KeptShare | None:
        """`top_p` with the preset safe; with the others a larger fraction may drop pairs."""
        return KeptShare("top_p", 30) if self.preset == "safe" else None

    def keys(
        self, by_distance: "Array", heads: "Array", spans: "Spans", shares: "Array | None"
    ) -> "tuple[Array, top_p.Rule]":
        """Returns keys with the mass in the low 30 bits; bit 30 is set if forced."""
        import jax.numpy as jnp

        from mtraining_jax.selection.rules import top_p
        from mtraining_jax.selection.scores import estimate, last_queries

        del heads  # all have the same settings
        safe = self.preset == "safe"
        # One unit less than the total mass, which leaves bit 30 to forced entries.
        keys = jnp.minimum(by_distance, estimate.MASS_ONE - 1).astype(jnp.uint32)
        if safe:
            sinks = spans.spread(jnp.minimum(self.sink_tokens, spans.tokens))
            forced = spans.entries(keys.shape[-1]) < sinks[..., None]
            keys = keys.at[0].add(jnp.where(forced, jnp.uint32(estimate.MASS_ONE), 0))
        # A head without columns is ruined: a model of 270 heads lost 0.7 to 1.7 nats from three.
        minimum = min(1, self.max_verticals), 0
        if safe:
            minimum = max(self.min_verticals, self.sink_tokens), self.min_slashes
        maximum = self.max_verticals, self.max_slashes
        if shares is None:
            target = round(self.top_p * estimate.MASS_ONE)
        else:
            target = spans.per_row(shares)
        return keys, top_p.Rule(
            minimum=jnp.minimum(last_queries.per_kind(minimum, spans), spans.tokens),
            maximum=jnp.minimum(last_queries.per_kind(maximum, spans), spans.tokens),
            mass_target=target,
            mass_mask=estimate.MASS_ONE - 1,
            keep_crossing=safe,
        )

    def nearest(self, slash_count: "Array", spans: "Spans") -> "int | Array":
        import jax.numpy as jnp

        if self.preset == "safe":
            return self.local_blocks
        # The reference implementation pads short lists with -1, which selects the main diagonal.
        return (slash_count < jnp.minimum(self.max_slashes, spans.tokens)).astype(jnp.int32)

    def kept(self, probed: "Probed", most_columns: "Array | None") -> "Kept":
        """Selects columns and diagonals separately, or with the preset joint together."""
        if self.preset != "joint":
            return super().kept(probed, most_columns)
        import jax.numpy as jnp

        from mtraining_jax.selection.rules.joint_rule import JointRule, kept_together
        from mtraining_jax.selection.scores.last_queries import Kept

        names = [field.name for field in dataclasses.fields(JointRule)]
        rule = JointRule(**{name: getattr(self, name) for name in names})
        if most_columns is not None:
            rule = dataclasses.replace(rule, max_verticals=most_columns)
        by_columns, by_diagonals = probed.by_distance
        columns, diagonals = kept_together(by_columns, by_diagonals, probed.spans, rule)
        none = probed.spans.total(jnp.zeros(diagonals.shape, jnp.int32))
        return Kept(columns, diagonals, none)

    def statistics(self, saved: "Array") -> dict[str, "Array"]:
        """Returns the fraction of heads (of documents) that would have no column (paper)."""
        return {"saved_heads": saved} if self.preset == "paper" else {}

    def least_columns(self) -> int:
        # Sinks and the minimum (safe), sinks (joint), or a single column (paper).
        if self.preset == "paper":
            return min(1, self.max_verticals)
        least = self.min_verticals if self.preset == "safe" else 0
        return max(least, self.sink_tokens)

    def most_diagonals(self, num_blocks: int) -> int:
        if self.preset == "joint":
            return num_blocks
        return min(2 * self.max_slashes + self.local_blocks, num_blocks)

    def describe(self) -> str:
        also = (
            f", minimum block mass {100 * self.min_block_mass:g} %" if self.min_block_mass else ""
        )
        also += f", maximum density {100 * self.max_density:g} %" if self.max_density < 1 else ""
        also += f", {100 * self.local_fraction:g} % of it local" if self.local_fraction else ""
        return f"dynamic vertical-slash, top-p {self.top_p:g} ({self.preset}{also})"
