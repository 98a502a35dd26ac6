"""Forecasts of the selection cost, density and index size of a pattern, from its options.

A method of the options with a function's name and further arguments takes precedence over it.
"""

import functools
from collections.abc import Callable
from typing import Any

from mtraining_jax.cost_model.density import density_of_lists, density_of_vertical_slash
from mtraining_jax.patterns.adaspa import AdaSpa
from mtraining_jax.patterns.options.base import DenseOptions, PatternOptions
from mtraining_jax.patterns.options.probes import FixedBudgetOptions, ProbeOptions, ReplayOptions
from mtraining_jax.patterns.options.rows import (
    BlockTopKOptions,
    FlexPrefillOptions,
    MoBAOptions,
    RowOptions,
    SampledRowsOptions,
    XAttentionOptions,
)

_AS_MEASURED = "assumed by length, as measured with SmolLM2-135M"
_NOT_KNOWN = "ASSUMED: not known for this pattern; define expected_density in its options"


def _method_first[T](table: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(table)
    def cost(options: PatternOptions, *args: Any, **named: Any) -> T:
        method = getattr(options, table.__name__, None)
        return table(options, *args, **named) if method is None else method(*args, **named)

    return cost


@_method_first
def expected_density(options: PatternOptions, tokens: int) -> tuple[float, str]:
    """Returns the density to expect of sequences or documents of some tokens, and why."""
    exact = "exact: it depends only on the length"
    of_user = not type(options).__module__.startswith("mtraining_jax.")
    match options:
        case DenseOptions():
            return 1.0, "dense"
        case ReplayOptions():
            return options.replay_density, options.density_name
        case RowOptions():
            selected = density_of_lists(tokens, options.tau)
            density = selected + options.random_block_prob * (1 - selected)
            return density, _NOT_KNOWN if of_user else _AS_MEASURED
        case FlexPrefillOptions():
            # No published mean density of arXiv 2502.20766's settings is known.
            return density_of_lists(tokens), "assumed: as for patterns with lists per row of blocks"
        case MoBAOptions():
            size, pairs = options.chunk_size, 0
            for chunk in range(-(-tokens // size)):
                own = min(size, tokens - chunk * size)
                pairs += own * (own + 1) // 2 + own * min(chunk, options.top_k - 1) * size
            return pairs / (tokens * (tokens + 1) // 2), exact
        case BlockTopKOptions():
            rows = options.blocks(tokens)
            tiles = sum(min(row, options.top_blocks - 1) + 0.5 for row in range(rows))
            return tiles / (rows * rows / 2), exact
        case AdaSpa():
            return 1 - options.sparsity, "1 - sparsity"
    why = _NOT_KNOWN if of_user else f"{_AS_MEASURED} and, at 512K, by MTraining"
    return density_of_vertical_slash(tokens), why


def selects_an_index(options: PatternOptions) -> bool:
    """Whether a step selects an index, used or not."""
    return options.replay_estimate if isinstance(options, ReplayOptions) else options.selects


@_method_first
def scoring_share(options: PatternOptions) -> float:
    """FLOP of scoring pairs over those of a dense forward pass; 0 if probe queries are few."""
    match options:
        case SampledRowsOptions():
            return options.probe_queries_per_block / (2 * options.block_size)
        case XAttentionOptions():
            return 1 / (2 * options.stride)
        case FlexPrefillOptions() if options.js_threshold:
            return 1 / options.block_size**2  # One product per pair of blocks.
        case MoBAOptions():
            return 1 / options.chunk_size  # One product per query and chunk, of two per pair.
        case BlockTopKOptions():
            return 0.5 / options.block_size**2
        case AdaSpa():
            return 0.5  # One of the two products of a forward pass.
        case ReplayOptions() if options.replay_estimate:
            return scoring_share(options.replayed())
    return 0.0


@_method_first
def softmax_share(options: PatternOptions) -> float:
    """Scores that go through a softmax, as a fraction of all pairs; it may be the slower part."""
    match options:
        case SampledRowsOptions():
            return options.probe_queries_per_block / options.block_size
        case AdaSpa():
            return 1.0
        case ReplayOptions() if options.replay_estimate:
            return softmax_share(options.replayed())
    return 0.0


def reads_coded_keys(options: PatternOptions) -> bool:
    """Whether the Hopper kernel scores keys in 8 bits (`pallas_kernels.coded`)."""
    if isinstance(options, ReplayOptions):
        return options.replay_estimate and reads_coded_keys(options.replayed())
    return isinstance(options, SampledRowsOptions) and not options.columns


@_method_first
def capacities(
    options: PatternOptions, num_blocks: int, documents: bool = False
) -> tuple[int, int]:
    """Returns the int32 numbers an index stores per head, and how many are gathered columns."""
    row_bits, column_bits = -(-num_blocks // 32), -(-options.block_size // 32)
    match options:
        case DenseOptions():
            # Beginning and end of each block's document.
            return 2 * num_blocks if documents else 0, 0
        case SampledRowsOptions() if options.columns:
            # One bit per block and per token, and with documents a number per row.
            columns = min(options.columns, num_blocks * options.block_size)
            columns = options.document_columns(num_blocks) if documents else columns
            return num_blocks * (row_bits + column_bits + documents), columns
        case RowOptions() | FlexPrefillOptions() | BlockTopKOptions():
            # One bit per block; ranks share the rows.
            return num_blocks * row_bits, 0
        case MoBAOptions():
            # One bit per query and chunk, and a number per row of blocks; ranks share the rows.
            return num_blocks * (options.block_size * -(-_chunks(options, num_blocks) // 32) + 1), 0
        case FixedBudgetOptions():
            # Those of the largest budgets of any layer.
            return capacities(options.load_class().read(options), num_blocks, documents)
        case ReplayOptions():
            return capacities(options.replayed(), num_blocks, documents)
        case ProbeOptions() if documents:
            # One bit per block and per token, and a number per row of blocks.
            words = row_bits + column_bits
            return num_blocks * (words + 1), options.document_columns(num_blocks)
        case ProbeOptions():
            columns, diagonals = options.list_capacities(num_blocks)
            return diagonals + columns + 2, columns
    # A `BlockSparseIndex` with room for every block.
    return 2 * num_blocks * (num_blocks + 1), 0


@_method_first
def query_copies(options: PatternOptions, num_blocks: int) -> int:
    """Number of copies of all queries and outputs that a layer needs."""
    if not isinstance(options, MoBAOptions):
        return 0
    # One for each chunk that a query sees in addition to its own.
    return min(options.top_k, _chunks(options, num_blocks)) - 1


def _chunks(options: MoBAOptions, num_blocks: int) -> int:
    return -(-num_blocks * options.block_size // options.chunk_size)
