"""Options of the patterns that select columns and diagonals by the last queries, and of replay."""

import dataclasses
from typing import Annotated, Literal

from mtraining_jax.patterns.options.base import (
    BlockSize,
    MassFraction,
    MinSparseTokens,
    PatternOptions,
    ProbeQueries,
)
from mtraining_jax.patterns.options.rows import SampledRowsOptions, XAttentionOptions
from mtraining_jax.selection.random_index import MAX_DENSITY
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
    check_at_most,
)

_COLUMN_MULTIPLE = 128  # column capacities are rounded up to a multiple of this


class ProbeOptions(PatternOptions):
    """Capacities of columns and diagonals; with documents, all share 2 `max_verticals` columns."""

    supports_documents = True

    num_probe_queries: int
    max_verticals: int
    max_slashes: int
    min_sparse_tokens: int

    def row_sharded(self, documents: bool) -> bool:
        return documents

    def least_columns(self) -> int:
        """Number of columns that a document may keep whatever its length."""
        raise NotImplementedError(f"{type(self).__name__}.least_columns")

    def most_diagonals(self, num_blocks: int) -> int:
        """Returns the number of block diagonals that a list has room for."""
        return min(2 * self.max_slashes + 1, num_blocks)

    def list_capacities(self, num_blocks: int) -> tuple[int, int]:
        """Returns the room of a `VerticalSlashIndex` for columns and for block diagonals."""
        columns = min(_rounded(self.max_verticals), num_blocks * self.block_size)
        return columns, self.most_diagonals(num_blocks)

    def document_columns(self, num_blocks: int) -> int:
        """Returns the room for the columns of all documents of a sequence of NB blocks."""
        documents = self.most_documents(num_blocks)
        most = 2 * self.max_verticals + documents * self.least_columns()
        return _rounded(min(most, documents * self.max_verticals, num_blocks * self.block_size))


def _rounded(columns: int) -> int:
    return -(-columns // _COLUMN_MULTIPLE) * _COLUMN_MULTIPLE


@options
class VerticalSlashOptions(ProbeOptions):
    """The columns and diagonals with most of the attention mass."""

    pattern_class = "mtraining_jax.patterns.vertical_slash:VerticalSlash"
    budget_field = "top_p"

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

    def mass_fraction(self) -> MassFraction | None:
        """`top_p` with the preset safe; with paper a larger fraction may drop pairs."""
        return MassFraction("top_p", 30) if self.preset == "safe" else None

    def least_columns(self) -> int:
        # A single column (paper), or sinks and the minimum (safe).
        if self.preset == "paper":
            return min(1, self.max_verticals)
        return max(self.min_verticals, self.sink_tokens)

    def most_diagonals(self, num_blocks: int) -> int:
        return min(2 * self.max_slashes + self.local_blocks, num_blocks)

    def describe(self) -> str:
        return f"dynamic vertical-slash, top-p {self.top_p:g} ({self.preset})"


@options
class FixedBudgetOptions(PatternOptions):
    """Budgets of all layers of a model, from a file."""

    pattern_class = "mtraining_jax.patterns.budgets:FixedBudget"
    supports_documents = True

    budget_file: str | None = None
    """MInference JSON file with a budget for each layer and head; required."""
    num_probe_queries: ProbeQueries = 64
    sink_tokens: NonNegativeInt = 30
    """Number of first tokens that are always kept as verticals."""
    sliding_window: NonNegativeInt = 100
    """Number of nearest slashes (token distances) that are always kept, within the budget."""
    block_size: BlockSize = 128
    min_sparse_tokens: MinSparseTokens = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_most(self, "num_probe_queries", "block_size")
        if not self.budget_file:
            raise ValueError("budget_file=none is not allowed; set it to a MInference JSON file")

    def row_sharded(self, documents: bool) -> bool:
        return documents

    def describe(self) -> str:
        return f"vertical-slash with fixed budgets from {self.budget_file}"

    def more_pairs(self) -> str:
        return f"increase the budgets in sparsity.budget_file = {self.budget_file}"


@options
class MInferenceOptions(FixedBudgetOptions):
    """MInference's patterns for all layers of a model, from one of its published files.

    Heads of type `vertical_and_slash` keep max(first number, 30) columns and max(second, 50)
    diagonals; heads of type `stream_llm` keep the first tokens and the nearest ones. Other types
    are rejected, except `block_sparse` with `swap_block_sparse`.
    """

    pattern_class = "mtraining_jax.patterns.budgets:MInference"

    swap_block_sparse: bool = False
    """Give heads of type block_sparse 1000 verticals and 6096 slashes, as MInference's search does.
    Otherwise such heads, which no published file has, are rejected."""

    def describe(self) -> str:
        return f"MInference with budgets from {self.budget_file}"


@options
class ReplayOptions(VerticalSlashOptions):
    """A density to replay; the other fields configure the estimate that runs with it.

    With documents, the pairs drawn for the whole sequence are restricted to its documents. Their
    density within a document is therefore that of a window of its length, which is higher for
    short documents. The actual density is reported.
    """

    pattern_class = "mtraining_jax.patterns.replay:Replay"
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

    def __post_init__(self) -> None:
        super().__post_init__()
        self.replayed()  # validates the fields of the replayed pattern

    @property
    def of_lists(self) -> bool:
        """Whether random lists of blocks are replayed, else block diagonals and columns."""
        return self.replay_of != "vertical_slash"

    def replayed(self) -> PatternOptions:
        """Returns the options of the replayed pattern, with the values of these fields."""
        kinds = {
            "vertical_slash": VerticalSlashOptions,
            "xattention": XAttentionOptions,
            "sampled_rows": SampledRowsOptions,
        }
        kind = kinds[self.replay_of]
        return kind(**{x.name: getattr(self, x.name) for x in dataclasses.fields(kind)})

    def row_sharded(self, documents: bool) -> bool:
        return self.of_lists or documents

    def mass_fraction(self) -> None:
        return None

    def describe(self) -> str:
        also = ", plus selection cost" if self.replay_estimate else ""
        what = "lists for each row of blocks" if self.of_lists else "block diagonals and columns"
        return (
            f"{self.density_name}: {self.replay_density:.1%} of the causal pairs, random {what}"
            f"{also}"
        )
