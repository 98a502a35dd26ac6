"""Fixed budgets per layer and head, from files in the format of MInference (arXiv 2407.02490)."""

import dataclasses
import os
from pathlib import Path
from typing import Annotated, Self

import numpy as np

from mtraining_jax.patterns.base import (
    NOT_AN_OPTION,
    BlockSize,
    MinSparseTokens,
    ModelSizes,
    ProbeQueries,
    Traced,
)
from mtraining_jax.patterns.probe_pattern import ProbePattern
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.file_limits import read_json
from mtraining_jax.utils.limits import NonNegativeInt, check_at_most

# Type and two numbers; for vertical_and_slash the number of verticals and of slashes.
Head = tuple[str, int, int]
Cap = Annotated[NonNegativeInt | None, NOT_AN_OPTION]

# Minimum columns and diagonals of a vertical-slash head in the reference implementation.
_LEAST_COLUMNS, _LEAST_DIAGONALS = 30, 50
# What MInference's search writes for a head with best type block_sparse.
_SWAPPED = "vertical_and_slash", 1000, 6096


@options
class BudgetPattern(ProbePattern):
    """Common base of patterns with a number of columns and of diagonals for each head.

    A pytree: budgets are data, so layers can be stacked as [L, Hq] and scanned over; the caps are
    static and shared by all layers. They come from a file, or are given in Python.
    """

    arrays = ("verticals", "slashes")

    verticals: Traced = None
    """int32 [Hq], number of columns kept by each head."""
    slashes: Traced = None
    """int32 [Hq], number of diagonals kept by each head."""
    max_verticals: Cap = None
    """Static cap; larger entries of `verticals` are reduced to it."""
    max_slashes: Cap = None
    """Static cap; larger entries of `slashes` are reduced to it."""
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
        if not self.budget_file and None in (self.max_verticals, self.max_slashes):
            raise ValueError("budget_file=none is not allowed; set it to a MInference JSON file")

    def read(self) -> Self:
        """Reads the budgets of all layers, [L, Hq], from `budget_file`."""
        raise NotImplementedError(f"{type(self).__name__}.read")

    def bind(self, model: ModelSizes) -> Self:
        """Returns the budgets of all layers, [L, Hq].

        Raises:
            UserError: if the file cannot be read or does not match the model.
        """
        if not self.budget_file:  # given in Python
            return self
        bound = self.read()
        found, needed = bound.verticals.shape, (model.num_layers, model.num_heads)
        if found != needed:
            raise UserError(
                f"budget file {self.budget_file} has {found[0]} layers of {found[1]} heads, but "
                f"the model has {needed[0]} layers of {needed[1]} heads"
            )
        return bound

    def budget_rule(self, probed):
        """Returns the rule that keeps as many entries as the budgets of the rows' heads."""
        from mtraining_jax.selection.rules.columns_and_diagonals import by_budget

        most = self.most_columns(probed.segments), self.caps()[1]
        return by_budget(probed, (self.verticals, self.slashes), most)

    def more_pairs(self) -> str:
        return f"increase the budgets in sparsity.budget_file = {self.budget_file}"


@options
class FixedBudget(BudgetPattern):
    """A fixed number of verticals and slashes for each head.

    The first `sink_tokens` columns and the nearest `sliding_window` diagonals rank above all
    others.
    """

    by_logits = True

    def read(self) -> Self:
        heads = read_heads(str(self.budget_file))
        table = np.array([[head[1:] for head in layer] for layer in heads], np.int32)
        verticals, slashes = table[..., 0], table[..., 1]
        caps = {"max_verticals": int(verticals.max()), "max_slashes": int(slashes.max())}
        return dataclasses.replace(self, verticals=verticals, slashes=slashes, **caps)

    def keys(self, probed):
        from mtraining_jax.selection.rules.columns_and_diagonals import logit_keys

        keys = logit_keys(probed, self.sink_tokens, self.sliding_window)
        return keys, self.budget_rule(probed)

    def least_columns(self) -> int:
        return min(self.sink_tokens, self.caps()[0])

    def describe(self) -> str:
        return f"vertical-slash with fixed budgets from {self.budget_file or 'Python'}"


@options
class MInference(BudgetPattern):
    """Per head, a fixed number of the columns and diagonals with most softmax mass.

    The mass is that of the last `num_probe_queries` queries. Heads of type `vertical_and_slash`
    keep max(first number, 30) columns and max(second, 50) diagonals; heads of type `stream_llm`
    keep the first tokens and the nearest ones. Other types are rejected, except `block_sparse` with
    `swap_block_sparse`. Forced columns and diagonals come first and count toward the budgets. Ties
    go to the smaller position or distance. A diagonal selects the block diagonals that it touches;
    the main one is always selected.

    Causality: the last queries of the sequence determine the selection for all others.

    Source: MInference (arXiv 2407.02490). Its reference implementation rounds masses to the model's
    dtype before sorting; here they are multiples of 2^-30.
    """

    arrays = ("verticals", "slashes", "sinks", "windows")

    swap_block_sparse: bool = False
    """Give heads of type block_sparse 1000 verticals and 6096 slashes, as MInference's search does.
    Otherwise such heads, which no published file has, are rejected."""
    sinks: Traced = None
    """int32 [Hq], number of first columns, which are forced."""
    windows: Traced = None
    """int32 [Hq], number of nearest diagonals, which are forced."""
    max_sinks: Cap = None
    """Static cap, at least the largest entry of `sinks`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_verticals is not None and self.max_sinks is None:
            raise ValueError("max_sinks is missing: it must be at least the largest of sinks")

    def read(self) -> Self:
        heads = read_heads(str(self.budget_file))
        numbers = [
            [self._numbers(head, f"layer {i}, head {j}") for j, head in enumerate(layer)]
            for i, layer in enumerate(heads)
        ]
        arrays = np.moveaxis(np.array(numbers, np.int32), -1, 0)
        caps = (int(x.max()) for x in arrays)
        return dataclasses.replace(
            self,
            **dict(zip(self.arrays, arrays, strict=True)),
            **dict(zip(("max_verticals", "max_slashes", "max_sinks"), caps, strict=False)),
        )

    def _numbers(self, head: Head, where: str) -> tuple[int, int, int, int]:
        """Returns columns, diagonals, forced columns and forced diagonals of one head."""
        if head[0] == "block_sparse" and self.swap_block_sparse:
            head = _SWAPPED
        kind, first, second = head
        if kind == "vertical_and_slash":
            columns, diagonals = max(first, _LEAST_COLUMNS), max(second, _LEAST_DIAGONALS)
            return columns, diagonals, self.sink_tokens, self.sliding_window
        if kind == "stream_llm":
            return first, second, first, second
        advice = ""
        if kind == "block_sparse":
            advice = (
                "; set swap_block_sparse=true to give such heads 1000 columns and 6096 diagonals, "
                "as MInference's search does"
            )
        raise UserError(
            f"budget file {self.budget_file}, {where} has type {kind!r}; it must be "
            f"'vertical_and_slash' or 'stream_llm'{advice}"
        )

    def keys(self, probed):
        from mtraining_jax.selection.rules.columns_and_diagonals import mass_keys

        return mass_keys(probed, self.sinks, self.windows), self.budget_rule(probed)

    def least_columns(self) -> int:
        assert self.max_sinks is not None
        return min(self.max_sinks, self.caps()[0])

    def describe(self) -> str:
        return f"MInference with budgets from {self.budget_file or 'Python'}"


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
    return FixedBudget(budget_file=str(path), **options).read()


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
