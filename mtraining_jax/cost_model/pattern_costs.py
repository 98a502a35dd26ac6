"""Forecasts of the selection cost, density and index size of a pattern, from its options.

Each function is a table by the class of the options. A method of the options with the function's
name and arguments takes precedence.
"""

import functools
from collections.abc import Callable
from typing import Any

from mtraining_jax.cost_model.density import density_of_lists, density_of_vertical_slash
from mtraining_jax.patterns.adaspa import AdaSpa
from mtraining_jax.patterns.options.base import DenseOptions, PatternOptions
from mtraining_jax.patterns.options.probes import (
    FixedBudgetOptions,
    ProbeOptions,
    ReplayOptions,
    VerticalSlashOptions,
)
from mtraining_jax.patterns.options.rows import (
    BlockTopKOptions,
    FlexPrefillOptions,
    MoBAOptions,
    RowOptions,
    SampledRowsOptions,
    XAttentionOptions,
)

_AS_MEASURED = "assumed by length, as measured with SmolLM2-135M"


def _by_options(default: Callable[..., Any]) -> Any:
    """Calls the method of the default's name, or dispatches on the class of the options."""
    table = functools.singledispatch(default)

    @functools.wraps(table)  # and with its `register` and `dispatch`
    def cost(options: PatternOptions, *args: Any, **named: Any) -> Any:
        method = getattr(options, default.__name__, None)
        return table(options, *args, **named) if method is None else method(*args, **named)

    return cost


@_by_options
def expected_density(options: PatternOptions, tokens: int) -> tuple[float, str]:
    """Returns the density to expect of sequences or documents of some tokens, and why."""
    return density_of_vertical_slash(tokens), f"{_AS_MEASURED} and, at 512K, by MTraining"


@expected_density.register
def _(options: DenseOptions, tokens: int) -> tuple[float, str]:
    return 1.0, "dense"


@expected_density.register
def _(options: VerticalSlashOptions, tokens: int) -> tuple[float, str]:
    density, why = expected_density.dispatch(PatternOptions)(options, tokens)
    return min(density, options.max_density), why


@expected_density.register
def _(options: ReplayOptions, tokens: int) -> tuple[float, str]:
    return options.replay_density, options.density_name


@expected_density.register
def _(options: RowOptions, tokens: int) -> tuple[float, str]:
    selected = density_of_lists(tokens, options.tau)
    return selected + options.random_block_prob * (1 - selected), _AS_MEASURED


@expected_density.register
def _(options: FlexPrefillOptions, tokens: int) -> tuple[float, str]:
    # No published mean density of arXiv 2502.20766's settings is known.
    return density_of_lists(tokens), "assumed: as for patterns with lists per row of blocks"


@expected_density.register
def _(options: MoBAOptions, tokens: int) -> tuple[float, str]:
    size, pairs = options.chunk_size, 0
    for chunk in range(-(-tokens // size)):
        own = min(size, tokens - chunk * size)
        pairs += own * (own + 1) // 2 + own * min(chunk, options.top_k - 1) * size
    return pairs / (tokens * (tokens + 1) // 2), "exact: it depends only on the length"


@expected_density.register
def _(options: BlockTopKOptions, tokens: int) -> tuple[float, str]:
    rows = options.blocks(tokens)
    tiles = sum(min(row, options.top_blocks - 1) + 0.5 for row in range(rows))
    return tiles / (rows * rows / 2), "exact: it depends only on the length"


@expected_density.register
def _(options: AdaSpa, tokens: int) -> tuple[float, str]:
    return 1 - options.sparsity, "1 - sparsity"


def selects_an_index(options: PatternOptions) -> bool:
    """Whether a step selects an index, used or not."""
    return options.replay_estimate if isinstance(options, ReplayOptions) else options.selects


@_by_options
def scoring_share(options: PatternOptions) -> float:
    """FLOP of scoring pairs over those of a dense forward pass; 0 if probe queries are few."""
    return 0.0


@scoring_share.register
def _(options: SampledRowsOptions) -> float:
    return options.probe_queries_per_block / (2 * options.block_size)


@scoring_share.register
def _(options: XAttentionOptions) -> float:
    return 1 / (2 * options.stride)


@scoring_share.register
def _(options: FlexPrefillOptions) -> float:
    # One product per pair of blocks; the last queries are few.
    return 1 / options.block_size**2 if options.js_threshold else 0.0


@scoring_share.register
def _(options: MoBAOptions) -> float:
    # One product per query and chunk, of two per pair.
    return 1 / options.chunk_size


@scoring_share.register
def _(options: BlockTopKOptions) -> float:
    return 0.5 / options.block_size**2


@scoring_share.register
def _(options: AdaSpa) -> float:
    # One of the two products of a forward pass.
    return 0.5


@scoring_share.register
def _(options: ReplayOptions) -> float:
    return scoring_share(options.replayed()) if options.replay_estimate else 0.0


@_by_options
def softmax_share(options: PatternOptions) -> float:
    """Scores that go through a softmax, as a fraction of all pairs; it may be the slower part."""
    return 0.0


@softmax_share.register
def _(options: SampledRowsOptions) -> float:
    return options.probe_queries_per_block / options.block_size


@softmax_share.register
def _(options: AdaSpa) -> float:
    return 1.0


@softmax_share.register
def _(options: ReplayOptions) -> float:
    return softmax_share(options.replayed()) if options.replay_estimate else 0.0


@_by_options
def capacities(
    options: PatternOptions, num_blocks: int, documents: bool = False
) -> tuple[int, int]:
    """Returns the int32 numbers an index stores per head, and how many of them are columns.

    Of sequences of NB blocks with or without packed documents. Columns are keys gathered per head.
    The default is a `BlockSparseIndex` with room for every block.
    """
    return 2 * num_blocks * (num_blocks + 1), 0


@capacities.register
def _(options: DenseOptions, num_blocks: int, documents: bool = False) -> tuple[int, int]:
    # Beginning and end of each block's document.
    return 2 * num_blocks if documents else 0, 0


@capacities.register(RowOptions)
@capacities.register(FlexPrefillOptions)
@capacities.register(BlockTopKOptions)
def _(options: PatternOptions, num_blocks: int, documents: bool = False) -> tuple[int, int]:
    # One bit per block; ranks share the rows.
    return num_blocks * -(-num_blocks // 32), 0


@capacities.register
def _(options: SampledRowsOptions, num_blocks: int, documents: bool = False) -> tuple[int, int]:
    numbers, columns = capacities.dispatch(RowOptions)(options, num_blocks, documents)
    if options.columns:
        # One bit per token, and with documents a number per row.
        numbers += num_blocks * (-(-options.block_size // 32) + documents)
        columns = min(options.columns, num_blocks * options.block_size)
        columns = options.document_columns(num_blocks) if documents else columns
    return numbers, columns


@capacities.register
def _(options: MoBAOptions, num_blocks: int, documents: bool = False) -> tuple[int, int]:
    # One bit per query and chunk, and a number per row of blocks; ranks share the rows.
    chunks = -(-num_blocks * options.block_size // options.chunk_size)
    return num_blocks * (options.block_size * -(-chunks // 32) + 1), 0


@capacities.register
def _(options: ProbeOptions, num_blocks: int, documents: bool = False) -> tuple[int, int]:
    if documents:
        # One bit per block and per token, and a number per row of blocks.
        words = -(-num_blocks // 32) + -(-options.block_size // 32)
        return num_blocks * (words + 1), options.document_columns(num_blocks)
    columns, diagonals = options.list_capacities(num_blocks)
    return diagonals + columns + 2, columns


@capacities.register
def _(options: FixedBudgetOptions, num_blocks: int, documents: bool = False) -> tuple[int, int]:
    # Those of the largest budgets of any layer.
    return capacities(options.load_class().read(options), num_blocks, documents)


@capacities.register
def _(options: ReplayOptions, num_blocks: int, documents: bool = False) -> tuple[int, int]:
    return capacities(options.replayed(), num_blocks, documents)


@_by_options
def query_copies(options: PatternOptions, num_blocks: int) -> int:
    """Number of copies of all queries and outputs that a layer needs."""
    return 0


@query_copies.register
def _(options: MoBAOptions, num_blocks: int) -> int:
    # One for each chunk that a query sees in addition to its own.
    chunks = -(-num_blocks * options.block_size // options.chunk_size)
    return min(options.top_k, chunks) - 1
