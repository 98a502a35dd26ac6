"""What patterns share that choose, for each row of blocks, the key blocks that hold most mass."""

import dataclasses
from typing import TYPE_CHECKING

from mtraining_jax.limits import check_limits, limited
from mtraining_jax.sparsity.assumed_density import density_of_lists
from mtraining_jax.sparsity.pattern import Choice, KeptShare, Pattern, Shards

if TYPE_CHECKING:
    from jax import Array

    from mtraining_jax.sparsity.row_rule import RowRule
    from pallas_kernels.index import BlockMaskIndex

# Tokens at the end of a prompt that see all of it: room for a question. In one block or two.
PROMPT_END = 128


@dataclasses.dataclass(frozen=True)
class RowPattern(Pattern):
    """Per head and row of blocks, the heaviest key blocks until a share of their mass is kept.

    A subclass says how blocks are scored (`scores`), or which are kept (`keep`). The rule is the
    same for all (`row_rule.RowRule`): forced blocks, then the others from the heaviest on, while
    what stands before is below `tau` of the row's mass. No row is ever empty.

    The keys of all ranks are gathered before the choice; what follows needs no exchange, and each
    rank keeps its own rows of the index (`BlockMaskIndex`).

    Causality: which blocks a row of blocks computes depends on all queries of that row. A query
    can so be influenced, through the choice alone, by the up to `block_size` - 1 tokens of its own
    block that come after it, and by nothing later.

    Attributes:
        tau: share of the estimated mass that each row of blocks keeps; the block that reaches it
            is kept. Multiples of 2^-15.
        sink_blocks: first blocks of keys, which are always kept.
        local_blocks: nearest blocks of keys that are always kept, a row's own among them.
        least_share: share of the row's mass that a block needs to be kept, even if `tau` is not
            reached without it; with tau 1 this alone decides. 0 asks for nothing.
        dense_start: queries of the first so many tokens of a sequence, or of a document in it, keep
            all of their pairs, rounded up to whole blocks: there are few of them.
        dense_end: queries of the last so many tokens of a sequence, or of a document in it, keep
            all of their pairs, rounded up to whole blocks; padding does not count. A question at
            the end of a prompt looks for single blocks, which a few sampled queries can miss. None:
            128 tokens where a prompt is read, and none in training.
        random_share: share of the blocks that are left out by all this which a row keeps all the
            same, drawn by a hash of the head and of their places: what is left out in one row is
            seen in training in another.
        dense_below: documents of fewer tokens than this, padding included, keep all of their pairs
            where several are packed into a sequence: choosing would save little there. Without
            documents it has no effect.
        block_size: g, tokens on a side of a block.
    """

    by_rows = True

    tau: limited(float, gt=0, le=1) = 0.9
    sink_blocks: limited(int, ge=0) = 1
    local_blocks: limited(int, ge=1) = 2
    least_share: limited(float, ge=0, le=1) = 0.0
    dense_start: limited(int, ge=0) = 0
    dense_end: limited(int, ge=0) | None = None
    random_share: limited(float, ge=0, lt=1) = 0.0
    dense_below: limited(int, ge=0) = 8192
    block_size: limited(int, ge=1) = 128

    def __post_init__(self) -> None:
        check_limits(self)

    def more_pairs(self) -> str:
        """The field that more pairs follow from."""
        least = self.least_share
        smaller = f", or sparsity.least_share = {least} smaller" if least else ""
        return f"sparsity.tau = {self.tau} may be larger{smaller}"

    def scores(self, q: "Array", k: "Array", shards: Shards) -> "Array":
        """The mass of each key block for each local row of blocks.

        Args:
            q: [B, n, Hq, D], local queries.
            k: [B, S, Hk, D], all keys, in the order of the sequence.
            shards: where the queries lie.

        Returns:
            fp32 [B, Hq, n/g, NB], at least 0, in any unit. The same bits for a row of blocks
            whatever other rows are on the rank. The mass is that within the row's document;
            what stands for other blocks is not read.
        """
        raise NotImplementedError(f"{type(self).__name__}.scores")

    def keep(self, q: "Array", k: "Array", shards: Shards) -> "Array":
        """The key blocks of each local row of blocks, by its `scores`.

        Args:
            q: as in `scores`, like k.
            k: see there.
            shards: see there.

        Returns:
            uint32 [B, Hq, n/g, ceil(NB/32)], bits as in `BlockMaskIndex`.
        """
        from mtraining_jax.sparsity.row_rule import kept_blocks

        scores = self.scores(q, k, shards)
        return kept_blocks(scores, shards.block_ids, self.rule(shards), shards.documents)

    def rule(self, shards: Shards) -> "RowRule":
        """The rule of all such patterns, with the settings of this one.

        Args:
            shards: where the rows lie; its shares take the place of `tau`.
        """
        from mtraining_jax.sparsity.row_rule import RowRule

        return RowRule(
            self.tau if shards.shares is None else shards.shares, self.sink_blocks,
            self.local_blocks, self.least_share, -(-self.dense_start // self.block_size),
            self.random_share, self._rows_at_end(shards) if self.dense_end else None,
        )  # fmt: skip

    def _rows_at_end(self, shards: Shards) -> "Array":
        """Whether each local row of blocks has a query of the last `dense_end`: bool [B or 1, n].

        In a dense document none has: it keeps everything anyway.
        """
        size, ends = self.block_size, shards.ends(shards.block_ids, self.block_size)
        if ends is None:
            ends = shards.num_blocks * size
        first = shards.block_ids[None] * size
        return (first < ends) & (first + size > ends - self.dense_end)

    def for_prompts(self) -> "RowPattern":
        """With a dense end, unless the settings say something of it."""
        if self.dense_end is not None:
            return self
        return dataclasses.replace(self, dense_end=PROMPT_END)

    def kept_share(self) -> KeptShare:
        """`tau`."""
        return KeptShare("tau", 15)

    def choose(self, q: "Array", k: "Array", shards: Shards) -> Choice:
        """Chooses the blocks that `keep` says."""
        from mtraining_jax.sparsity import exchange
        from mtraining_jax.sparsity.checks import check_choice

        check_choice(q, k, shards, self.block_size)
        if shards.documents is not None:
            # A document of fewer blocks than this has fewer tokens than `dense_below`.
            least = -(-self.dense_below // self.block_size)
            shards = dataclasses.replace(shards, documents=shards.documents.dense_below(least))
        where = shards.block_ids, shards.num_blocks, shards.axis_names
        return Choice(self.index(q, exchange.all_blocks(k, *where), shards))

    def index(self, q: "Array", k: "Array", shards: Shards) -> "BlockMaskIndex":
        """The index of the local rows of blocks; the arguments are those of `keep`."""
        from pallas_kernels.index import BlockMaskIndex

        return BlockMaskIndex(self.keep(q, k, shards), shards.num_blocks, self.block_size)

    def for_documents(self) -> "RowPattern":
        """The pattern itself: each row of blocks chooses in its own document."""
        return self

    def rule_in_words(self) -> str:
        """What the rule keeps, for `describe`."""
        least = f", at least {self.least_share:g} in a block" if self.least_share else ""
        start = f", all in the first {self.dense_start:,} tokens" if self.dense_start else ""
        end = f", all in the last {self.dense_end:,} tokens" if self.dense_end else ""
        drawn = f", {self.random_share:g} of the others at random" if self.random_share else ""
        return f"{self.tau:g} of each row of blocks{least}{start}{end}{drawn}"

    def expected_density(self, tokens: int) -> tuple[float, str]:
        """An assumption, by length and `tau`."""
        chosen = density_of_lists(tokens, self.tau)
        drawn = self.random_share * (1 - chosen)
        return chosen + drawn, "assumed by length, as measured with SmolLM2-135M"

    def capacities(self, num_blocks: int) -> tuple[int, int]:
        """A bit for each block; ranks share them."""
        return num_blocks * -(-num_blocks // 32), 0
