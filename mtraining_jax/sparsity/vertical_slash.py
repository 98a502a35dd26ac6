"""Dynamic vertical-slash: the columns and diagonals that hold most of the attention's mass."""

import dataclasses
from typing import TYPE_CHECKING, Literal

from mtraining_jax.limits import check_at_most, check_limits, limited
from mtraining_jax.sparsity.pattern import Choice, KeptShare, Pattern, Settings, Shards

if TYPE_CHECKING:
    from jax import Array

    from mtraining_jax.sparsity.spans import Spans

COLUMN_MULTIPLE = 128  # to which the room for columns is rounded up


@dataclasses.dataclass(frozen=True)
class VerticalSlashSettings(Settings):
    """The fields of `VerticalSlash`, which describes them."""

    top_p: limited(float, gt=0, le=1) = 0.90
    max_verticals: limited(int, ge=0) = 4096
    max_slashes: limited(int, ge=0) = 4096
    preset: Literal["safe", "paper", "joint"] = "safe"
    last_q: limited(int, ge=1) = 64
    block_size: limited(int, ge=1) = 128
    sink_tokens: limited(int, ge=0) = 30
    local_blocks: limited(int, ge=1) = 2
    min_verticals: limited(int, ge=0) = 128
    min_slashes: limited(int, ge=0) = 16
    least_share: limited(float, ge=0, le=1) = 0.0
    max_density: limited(float, gt=0, le=1) = 1.0
    local_share: limited(float, ge=0, le=1) = 0.0

    def __post_init__(self) -> None:
        check_limits(self)
        check_at_most(self, "last_q", "block_size")
        if self.preset != "paper":
            check_at_most(self, "sink_tokens", "max_verticals")
        if self.preset == "safe":
            check_at_most(self, "min_verticals", "max_verticals")
            check_at_most(self, "min_slashes", "max_slashes")

    def more_pairs(self) -> str:
        """The field that more pairs follow from."""
        return f"sparsity.top_p = {self.top_p} may be larger"

    def expected_density(self, tokens: int) -> tuple[float, str]:
        """An assumption by length, which `max_density` limits."""
        density, why = super().expected_density(tokens)
        return min(density, self.max_density), why

    def capacities(self, num_blocks: int) -> tuple[int, int]:
        """Numbers and columns that an index of one head has room for."""
        columns, diagonals = index_capacities(self, num_blocks)
        return diagonals + columns + 2, columns


@dataclasses.dataclass(frozen=True)
class VerticalSlash(VerticalSlashSettings, Pattern):
    """Top-p choice: per head, the largest columns and diagonals until their mass reaches p.

    Two presets take columns and diagonals apart, and differ in what happens at the edges:

    - ``safe``: the entry that crosses p is kept, the first `sink_tokens` columns and the nearest
      `local_blocks` block diagonals are always kept, and so is a minimum number of columns and
      diagonals. No row of the attention matrix is ever empty.
    - ``paper``: as the reference implementation counts. The entry that crosses p is dropped, and
      nothing is forced, with two exceptions. One it has too: its padding of a slash list that is
      not full switches the main block diagonal on. With a full list nothing is forced, and rows
      may be empty. The other is ours: a head whose first column crosses p by itself keeps that
      column. The reference leaves such a head without any, which costs more than a nat of loss.

    The third takes them together (`joint_rule`):

    - ``joint``: columns and block diagonals by the mass that they gain for each pair that they
      cost, until what both hold together reaches p. What is forced is as in ``safe``, but for the
      minimum numbers.

    Attributes:
        top_p: share of the estimated attention mass to keep, of columns and of diagonals each; of
            both together (of the presets, joint).
        max_verticals: most columns kept for one head, tokens.
        max_slashes: most diagonals kept for one head, tokens (safe, paper). Each acts through at
            most two block diagonals.
        preset: safe always keeps sinks, local blocks and minimum budgets; paper only what top_p
            keeps; joint counts columns and diagonals together.
        last_q: queries, at the end of the sequence, whose attention is the estimate; at most
            block_size.
        block_size: g, tokens on a side of a block.
        sink_tokens: first columns that are always kept (safe, joint).
        local_blocks: nearest block diagonals that are always kept (safe, joint).
        min_verticals: fewest columns kept for one head (safe). One tile of columns is nearly free.
        min_slashes: fewest diagonals kept for one head (safe). Small, since each scattered
            diagonal may cost two block diagonals.
        least_share: share of the mass that a block of pairs must gain in its row of blocks to be
            kept, even if top_p is not reached without it (joint). With top_p 1 this alone decides,
            and heads with much mass in few pairs get few. 0 asks for nothing.
        max_density: most pairs of a head, over the causal ones (joint). What is forced may exceed
            it.
        local_share: share of the pairs of max_density that the nearest block diagonals take before
            all else (joint): as many of them as fit in with the sinks, where these are more than
            local_blocks. With 1 nothing else fits but what is less than one diagonal.
        dense_below: documents of fewer tokens than this, padding included, keep all of their pairs
            where several are packed into a sequence: choosing would save little there. Without
            documents it has no effect.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    dense_below: limited(int, ge=0) = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, unused in (("least_share", 0.0), ("max_density", 1.0), ("local_share", 0.0)):
            if self.preset != "joint" and getattr(self, name) != unused:
                raise ValueError(
                    f"{name}={getattr(self, name)} is an option of preset='joint', but preset is "
                    f"{self.preset!r}; {name}={unused:g} leaves it out"
                )
        if self.local_share and self.max_density == 1:
            raise ValueError(
                f"local_share={self.local_share} is a share of max_density, which is 1: set it too"
            )

    def choose(self, q: "Array", k: "Array", shards: Shards) -> Choice:
        """Chooses by the softmax mass of the last queries (arXiv 2510.18830, vertical-slash).

        The preset paper reports `saved_heads`, the share of heads that would have been left
        without any column.
        """
        from mtraining_jax.sparsity import last_queries

        together = self._together if self.preset == "joint" else None
        rule = _Rule(self)
        if shards.shares is not None:
            from mtraining_jax.sparsity import exchange

            rows = exchange.entries_of(q.shape[0], q.shape[2], shards.axis_names)
            rule = _Rule(self, shards.shares[rows])
        index, saved = last_queries.choose(q, k, shards, self, rule, together)
        return Choice(index, {"saved_heads": saved} if self.preset == "paper" else {})

    def kept_share(self) -> KeptShare | None:
        """`top_p`, of the preset safe: with the others a larger share may leave pairs out."""
        return KeptShare("top_p", 30) if self.preset == "safe" else None

    def for_documents(self) -> "VerticalSlash":
        """Columns and diagonals for each document."""
        from mtraining_jax.sparsity.document_last_queries import for_documents
        from mtraining_jax.sparsity.document_vertical_slash import DocumentVerticalSlash

        return for_documents(self, DocumentVerticalSlash)

    def kept(
        self, by_distance: "Array", heads: "Array", spans: "Spans", most_columns: "Array",
        shares: "Array | None" = None,
    ) -> tuple:
        """What is kept of scores, `last_queries.Kept`.

        Args:
            by_distance: int32 [2, R, NB, g], as in `last_queries.Rule.keys`.
            heads: int32 [R], see there.
            spans: the sequences.
            most_columns: int32 [R, E], at most `max_verticals`: most of each sequence.
            shares: int32 [R], as of `Shards`, in the place of `top_p`.
        """
        from mtraining_jax.sparsity import last_queries

        if self.preset == "joint":
            return self._together(by_distance, spans, most_columns)
        rule = _Rule(self, shares)
        return last_queries.each_kind(rule, by_distance, heads, spans, most_columns)

    def _together(
        self, by_distance: "Array", spans: "Spans", most_columns: "Array | None" = None
    ) -> tuple:
        """What `last_queries.choose` asks of a rule for columns and diagonals at once."""
        import jax.numpy as jnp

        from mtraining_jax.sparsity.joint_rule import JointRule, kept_together

        names = [field.name for field in dataclasses.fields(JointRule)]
        rule = JointRule(**{name: getattr(self, name) for name in names})
        if most_columns is not None:
            rule = dataclasses.replace(rule, max_verticals=most_columns)
        columns, diagonals = kept_together(*by_distance, spans, rule)
        none = spans.total(jnp.zeros(diagonals.shape, jnp.int32))
        return columns, diagonals, none

    def describe(self) -> str:
        """Kind, top-p and preset, and what else limits the preset joint."""
        also = f", at least {self.least_share:g} for a block" if self.least_share else ""
        also += f", at most {self.max_density:g} of the pairs" if self.max_density < 1 else ""
        also += f", {self.local_share:g} of them the nearest" if self.local_share else ""
        return f"dynamic vertical-slash, top-p {self.top_p:g} ({self.preset}{also})"


def index_capacities(settings: Settings, num_blocks: int) -> tuple[int, int]:
    """Columns and block diagonals that an index has room for.

    Args:
        settings: with `max_verticals`, `max_slashes` and, if block diagonals are forced,
            `local_blocks`.
        num_blocks: NB, blocks of the whole sequence.

    Returns:
        (max_verticals rounded up to 128, at most S; 2 * max_slashes + local_blocks, at most NB).
        The preset joint has room for every block diagonal.
    """
    rounded = -(-settings.max_verticals // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    slash_blocks = 2 * settings.max_slashes + getattr(settings, "local_blocks", 1)
    if getattr(settings, "preset", None) == "joint":
        slash_blocks = num_blocks
    return min(rounded, num_blocks * settings.block_size), min(slash_blocks, num_blocks)


@dataclasses.dataclass(frozen=True)
class _Rule:
    """What `last_queries.choose` asks: scores, what of them to keep, and what is forced."""

    settings: VerticalSlash
    shares: "Array | None" = None  # int32 [R], in the place of `top_p`

    def scores(self, q_last: "Array", k: "Array", shards: Shards, scale: float) -> tuple:
        """Mean softmax masses."""
        from mtraining_jax.sparsity import estimate

        return estimate.softmax_scores(
            q_last, k, scale=scale, backend=shards.backend, axis_names=shards.axis_names,
            block_ids=shards.block_ids, num_blocks=shards.num_blocks, valid_len=shards.valid_len,
        )  # fmt: skip

    def keys(self, by_distance: "Array", heads: "Array", spans: "Spans") -> tuple:
        """Keys whose low 30 bits are the mass, with bit 30 set for what is forced."""
        import jax.numpy as jnp

        from mtraining_jax.sparsity import estimate, last_queries, select

        del heads  # all have the same settings
        settings, keys = self.settings, by_distance
        safe = settings.preset == "safe"
        # One unit less than all the mass, to leave bit 30 for the forced entries.
        keys = jnp.minimum(keys, estimate.MASS_ONE - 1).astype(jnp.uint32)
        if safe:
            sinks = spans.spread(jnp.minimum(settings.sink_tokens, spans.tokens))
            forced = spans.entries(keys.shape[-1]) < sinks[..., None]
            keys = keys.at[0].add(jnp.where(forced, jnp.uint32(estimate.MASS_ONE), 0))
        # Without any column a head is ruined: a model of 270 heads lost 0.7 to 1.7 nats by three.
        minimum = min(1, settings.max_verticals), 0
        if safe:
            minimum = max(settings.min_verticals, settings.sink_tokens), settings.min_slashes
        maximum = settings.max_verticals, settings.max_slashes
        if self.shares is None:
            target = round(settings.top_p * estimate.MASS_ONE)
        else:
            target = spans.per_row(self.shares)
        return keys, select.Rule(
            minimum=jnp.minimum(last_queries.per_kind(minimum, spans), spans.tokens),
            maximum=jnp.minimum(last_queries.per_kind(maximum, spans), spans.tokens),
            mass_target=target,
            mass_mask=estimate.MASS_ONE - 1,
            keep_crossing=safe,
        )

    def nearest(self, slash_count: "Array", spans: "Spans") -> "int | Array":
        """How many block diagonals, from the main one on, are forced."""
        import jax.numpy as jnp

        settings = self.settings
        if settings.preset == "safe":
            return settings.local_blocks
        # The reference pads short lists with -1, which acts on the main block diagonal.
        return (slash_count < jnp.minimum(settings.max_slashes, spans.tokens)).astype(jnp.int32)
