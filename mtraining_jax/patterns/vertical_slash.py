"""Dynamic vertical-slash: the columns and diagonals with most of the attention mass."""

from typing import Literal

from mtraining_jax.patterns.base import BlockSize, MinSparseTokens, ProbeQueries
from mtraining_jax.patterns.probe_pattern import ProbePattern
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.limits import NonNegativeInt, PositiveFraction, PositiveInt, check_at_most

_TOP_P_BITS = 30  # of the masses of columns and diagonals


@options
class VerticalSlash(ProbePattern):
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

    density_option = "top_p"

    top_p: PositiveFraction = 0.90
    """Attention mass to keep, as a fraction of the estimated mass, of verticals and of slashes."""
    max_verticals: NonNegativeInt = 4096
    """Maximum number of verticals (key columns) per head."""
    max_slashes: NonNegativeInt = 4096
    """Maximum number of slashes (diagonals) per head. Each selects at most two block diagonals."""
    preset: Literal["safe", "paper"] = "safe"
    """safe always keeps sinks, local blocks and minimum budgets; paper keeps only what top_p
    selects."""
    num_probe_queries: ProbeQueries = 64
    block_size: BlockSize = 128
    sink_tokens: NonNegativeInt = 30
    """Number of first tokens that are always kept as verticals (preset safe)."""
    local_blocks: PositiveInt = 2
    """Number of nearest key blocks (block diagonals) that are always kept, including the query's
    own (vertical_slash: preset safe)."""
    min_verticals: NonNegativeInt = 128
    """Minimum number of verticals per head (preset safe). One tile of columns is nearly free."""
    min_slashes: NonNegativeInt = 16
    """Minimum number of slashes per head (preset safe). Small, since each isolated slash may cost
    two block diagonals."""
    min_sparse_tokens: MinSparseTokens = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_most(self, "num_probe_queries", "block_size")
        if self.preset != "paper":
            check_at_most(self, "sink_tokens", "max_verticals")
            check_at_most(self, "min_verticals", "max_verticals")
            check_at_most(self, "min_slashes", "max_slashes")

    def overridable(self):
        """`top_p` with the preset safe; with paper a larger fraction may drop pairs."""
        return {"top_p": _TOP_P_BITS} if self.preset == "safe" else {}

    def keys(self, probed):
        from mtraining_jax.selection.rules import columns_and_diagonals

        safe = self.preset == "safe"
        return columns_and_diagonals.by_mass(
            probed,
            probed.overrides.get("top_p", round(self.top_p * (1 << _TOP_P_BITS))),
            minimum=(self.least_columns(), self.min_slashes if safe else 0),
            maximum=(self.most_columns(probed.segments), self.max_slashes),
            sinks=self.sink_tokens if safe else None,
        )

    def nearest(self, slash_count, segments):
        if self.preset == "safe":
            return self.local_blocks
        # The reference implementation pads short lists with -1, which selects the main diagonal.
        return ((slash_count < self.max_slashes) & (slash_count < segments.tokens)).astype("int32")

    def statistics(self, saved):
        return {"saved_heads": saved} if self.preset == "paper" else {}

    def least_columns(self) -> int:
        # A head without columns is ruined: a model of 270 heads lost 0.7 to 1.7 nats from three.
        if self.preset == "paper":
            return min(1, self.max_verticals)
        return max(self.min_verticals, self.sink_tokens)

    def most_diagonals(self, num_blocks: int) -> int:
        return min(2 * self.max_slashes + self.local_blocks, num_blocks)

    def describe(self) -> str:
        return f"dynamic vertical-slash, top-p {self.top_p:g} ({self.preset})"
