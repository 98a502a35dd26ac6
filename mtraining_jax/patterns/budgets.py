"""Fixed budgets per layer and head, from files in the format of MInference (arXiv 2407.02490)."""

import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from mtraining_jax.patterns.base import Pattern, Traced
from mtraining_jax.patterns.options.base import BlockSize, MinSparseTokens, ModelSizes, ProbeQueries
from mtraining_jax.patterns.options.probes import FixedBudgetOptions, MInferenceOptions
from mtraining_jax.patterns.probe_pattern import ProbePattern
from mtraining_jax.selection.rules import top_p
from mtraining_jax.selection.scores.last_queries import Probed, per_kind
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.file_limits import read_json
from mtraining_jax.utils.limits import NonNegativeInt, check_at_most

# Type and two numbers; for vertical_and_slash the number of verticals and of slashes.
Head = tuple[str, int, int]

# Minimum columns and diagonals of a vertical-slash head in the reference implementation.
_LEAST_COLUMNS, _LEAST_DIAGONALS = 30, 50
# What MInference's search writes for a head with best type block_sparse.
_SWAPPED = "vertical_and_slash", 1000, 6096


class BudgetPattern(ProbePattern):
    """Common base of patterns with a number of columns and of diagonals for each head."""

    verticals: Traced
    slashes: Traced

    @classmethod
    def read(cls, options: Any) -> "BudgetPattern":
        """Reads the budgets of all layers, [L, Hq], from the file of the options."""
        raise NotImplementedError(f"{cls.__name__}.read")

    @classmethod
    def from_options(cls, options: Any, model: ModelSizes) -> Pattern:
        """Returns the budgets of all layers, [L, Hq].

        Raises:
            UserError: if the file cannot be read or does not match the model.
        """
        budgets = cls.read(options)
        found, needed = budgets.verticals.shape, (model.num_layers, model.num_heads)
        if found != needed:
            raise UserError(
                f"budget file {options.budget_file} has {found[0]} layers of {found[1]} heads, but "
                f"the model has {needed[0]} layers of {needed[1]} heads"
            )
        return budgets

    def rule(self, probed: Probed) -> top_p.Rule:
        """Returns the rule that keeps as many entries as the budgets of the rows' heads."""
        spans = probed.spans
        budgets = jnp.stack([jnp.asarray(self.verticals), jnp.asarray(self.slashes)])
        caps = per_kind(self.most_columns(spans), self.max_slashes)
        if not jnp.issubdtype(budgets.dtype, jnp.integer):
            raise ValueError(f"verticals or slashes are {budgets.dtype}; they must be integers")
        budgets = budgets[:, probed.heads, None]
        budgets = jnp.clip(budgets, 0, jnp.minimum(caps, spans.tokens))
        return top_p.Rule(minimum=0, maximum=budgets.astype(jnp.int32))


@options
class FixedBudget(BudgetPattern):
    """A fixed number of verticals and slashes for each head.

    A pytree: budgets are data, so layers can be stacked as [L, Hq] and scanned over; the caps are
    static and shared by all layers.
    """

    arrays = ("verticals", "slashes")
    by_logits = True

    verticals: Traced
    """int32 [Hq], number of columns kept by each head."""
    slashes: Traced
    """int32 [Hq], number of diagonals kept by each head."""
    max_verticals: NonNegativeInt
    """Static cap; larger entries of `verticals` are reduced to it."""
    max_slashes: NonNegativeInt
    """Static cap; larger entries of `slashes` are reduced to it."""
    num_probe_queries: ProbeQueries = 64
    block_size: BlockSize = 128
    sink_tokens: NonNegativeInt = 30
    """Number of first columns that rank above all others."""
    sliding_window: NonNegativeInt = 100
    """Number of nearest diagonals that rank above all others."""
    min_sparse_tokens: MinSparseTokens = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_most(self, "num_probe_queries", "block_size")

    @classmethod
    def read(cls, options: FixedBudgetOptions) -> "FixedBudget":
        return load_budgets(
            str(options.budget_file),
            num_probe_queries=options.num_probe_queries,
            block_size=options.block_size,
            sink_tokens=options.sink_tokens,
            sliding_window=options.sliding_window,
            min_sparse_tokens=options.min_sparse_tokens,
        )

    def keys(self, probed: Probed) -> tuple[Array, top_p.Rule]:
        """Returns keys in the order of the sums of logits; forced entries rank first."""
        spans = probed.spans
        numbers = spans.entries(probed.by_distance.shape[-1])
        forced = jnp.stack([numbers < self.sink_tokens, numbers < self.sliding_window])
        # Rows with a single sequence share these numbers; rows with several have one set each.
        forced = forced.reshape(2, -1, *numbers.shape[-2:])
        scores = jnp.where(forced, jnp.inf, probed.by_distance)
        tokens = spans.spread(jnp.asarray(spans.tokens))[..., None]
        keys = top_p.float_keys(jnp.where(numbers < tokens, scores, -jnp.inf))
        return keys, self.rule(probed)

    def least_columns(self) -> int:
        return min(self.sink_tokens, self.max_verticals)


@options
class MInference(BudgetPattern):
    """Per head, a fixed number of the columns and diagonals with most softmax mass.

    The mass is that of the last `num_probe_queries` queries. Forced columns and diagonals come
    first and count toward the budgets. Ties go to the smaller position or distance. A diagonal
    selects the block diagonals that it touches; the main one is always selected.

    Causality: the last queries of the sequence determine the selection for all others.

    Source: MInference (arXiv 2407.02490). Its reference implementation rounds masses to the model's
    dtype before sorting; here they are multiples of 2^-30.

    A pytree: its arrays are data, so layers can be stacked as [L, Hq] and scanned over.
    """

    arrays = ("verticals", "slashes", "sinks", "windows")

    verticals: Traced
    """As in `FixedBudget`."""
    slashes: Traced
    """As in `FixedBudget`."""
    sinks: Traced
    """int32 [Hq], number of first columns, which are forced."""
    windows: Traced
    """int32 [Hq], number of nearest diagonals, which are forced."""
    max_verticals: NonNegativeInt
    """As in `FixedBudget`."""
    max_slashes: NonNegativeInt
    """As in `FixedBudget`."""
    max_sinks: NonNegativeInt
    """Static cap, at least the largest entry of `sinks`."""
    num_probe_queries: ProbeQueries = 64
    block_size: BlockSize = 128
    min_sparse_tokens: MinSparseTokens = 8192

    @classmethod
    def read(cls, options: MInferenceOptions) -> "MInference":
        heads = read_heads(str(options.budget_file))
        numbers = [
            [_minference_numbers(head, options, f"layer {i}, head {j}") for j, head in enumerate(x)]
            for i, x in enumerate(heads)
        ]
        verticals, slashes, sinks, windows = np.moveaxis(np.array(numbers, np.int32), -1, 0)
        return cls(
            verticals=verticals,
            slashes=slashes,
            sinks=sinks,
            windows=windows,
            max_verticals=int(verticals.max()),
            max_slashes=int(slashes.max()),
            max_sinks=int(sinks.max()),
            num_probe_queries=options.num_probe_queries,
            block_size=options.block_size,
            min_sparse_tokens=options.min_sparse_tokens,
        )

    def keys(self, probed: Probed) -> tuple[Array, top_p.Rule]:
        """Returns masses plus one, with the highest bit set if forced, and 0 for padding."""
        spans = probed.spans
        numbers = spans.entries(probed.by_distance.shape[-1])
        forced = jnp.stack([jnp.asarray(self.sinks), jnp.asarray(self.windows)])
        forced = numbers < forced[:, probed.heads, None, None]
        keys = probed.by_distance.astype(jnp.uint32) + 1
        keys = jnp.where(forced, jnp.uint32(1 << 31), keys)
        tokens = spans.spread(jnp.asarray(spans.tokens))[..., None]
        return jnp.where(numbers < tokens, keys, 0), self.rule(probed)

    def least_columns(self) -> int:
        return min(self.max_sinks, self.max_verticals)


def _minference_numbers(
    head: Head, options: MInferenceOptions, where: str
) -> tuple[int, int, int, int]:
    """Returns columns, diagonals, forced columns and forced diagonals of one head."""
    if head[0] == "block_sparse" and options.swap_block_sparse:
        head = _SWAPPED
    kind, first, second = head
    if kind == "vertical_and_slash":
        columns, diagonals = max(first, _LEAST_COLUMNS), max(second, _LEAST_DIAGONALS)
        return columns, diagonals, options.sink_tokens, options.sliding_window
    if kind == "stream_llm":
        return first, second, first, second
    advice = ""
    if kind == "block_sparse":
        advice = (
            "; set swap_block_sparse=true to give such heads 1000 columns and 6096 diagonals, as "
            "MInference's search does"
        )
    raise UserError(
        f"budget file {options.budget_file}, {where} has type {kind!r}; it must be "
        f"'vertical_and_slash' or 'stream_llm'{advice}"
    )


def load_budgets(path: str | os.PathLike, **options: int) -> FixedBudget:
    """Reads the budgets of all layers of a model from a MInference file.

    Types and scores are ignored: every head is treated as vertical-slash, as in the reference
    implementation of arXiv 2510.18830. The kind `minference` reads the types.

    Args:
        path: JSON file, as in `read_heads`.
        options: other fields of `FixedBudget`, such as num_probe_queries.

    Returns:
        A pattern with arrays [L, Hq], to scan over or index by layer (`jax.tree.map`). The caps are
        the largest budgets of any layer.

    Raises:
        UserError: if the file cannot be read or is malformed; the message names layer and head.
    """
    table = np.array([[head[1:] for head in layer] for layer in read_heads(path)], np.int32)
    verticals, slashes = table[..., 0], table[..., 1]
    return FixedBudget(
        verticals=verticals,
        slashes=slashes,
        max_verticals=int(verticals.max()),
        max_slashes=int(slashes.max()),
        **options,
    )


def read_heads(path: str | os.PathLike) -> list[list[Head]]:
    """Reads type and two numbers of each head of each layer from a MInference budget file.

    The file is a JSON list with one entry per layer: an object from head number to
    `[type, verticals, slashes, score]`, or a list of these. Scores are ignored.

    Raises:
        UserError: if the file cannot be read or is malformed; the message names layer and head.
    """
    try:
        layers = read_json(Path(path).expanduser())
    except OSError as error:
        raise UserError(f"budget file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"budget file {path} is not JSON: {error}") from error
    if not isinstance(layers, list) or not layers:
        raise UserError(f"budget file {path} must be a JSON list with one entry per layer")
    rows = [_read_layer(layer, f"budget file {path}, layer {i}") for i, layer in enumerate(layers)]
    for i, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise UserError(
                f"budget file {path}, layer {i} has {len(row)} heads but layer 0 has {len(rows[0])}"
            )
    return rows


def _read_layer(layer, where: str) -> list[Head]:
    if isinstance(layer, dict):
        names = [str(head) for head in range(len(layer))]
        missing = [name for name in names if name not in layer]
        if missing:
            raise UserError(f"{where} has {len(layer)} heads but none numbered {missing[0]}")
        layer = [layer[name] for name in names]
    if not isinstance(layer, list) or not layer:
        raise UserError(f"{where} must be an object or a list with one entry per head")
    return [_read_head(entry, f"{where}, head {head}") for head, entry in enumerate(layer)]


def _read_head(entry, where: str) -> Head:
    if not isinstance(entry, list) or len(entry) < 3:
        raise UserError(f"{where} is {entry!r}; it must be [type, verticals, slashes, score]")
    kind, budgets = entry[0], entry[1:3]
    if any(isinstance(budget, list) for budget in budgets):
        raise UserError(
            f"{where} holds [top_p, cap] pairs instead of fixed budgets; use kind vertical_slash "
            "with top_p, max_verticals and max_slashes for these"
        )
    for budget in budgets:
        if isinstance(budget, bool) or not isinstance(budget, int) or not 0 <= budget < 2**31:
            raise UserError(f"{where} has budget {budget!r}; it must be an integer, at least 0")
    return str(kind), budgets[0], budgets[1]
