"""Fixed budgets per layer and head, read from MInference JSON files."""

import dataclasses
import json
import os

import numpy as np

from mtraining_jax.errors import UserError
from mtraining_jax.sparsity.patterns import FixedBudget


@dataclasses.dataclass(frozen=True)
class FixedBudgets:
    """Budgets of all layers of a model.

    Attributes:
        verticals: int32 [L, Hq], columns kept by each head of each layer.
        slashes: int32 [L, Hq], diagonals kept.
    """

    verticals: np.ndarray
    slashes: np.ndarray

    def pattern(self, **settings: int) -> FixedBudget:
        """The pattern of all layers, to be scanned over or indexed by layer (`jax.tree.map`).

        Its arrays are [L, Hq]; `choose_index` takes one layer's row, [Hq]. The caps are the
        largest budgets of any layer.

        Args:
            **settings: other fields of `FixedBudget`, such as last_q and block_size.
        """
        return FixedBudget(
            verticals=self.verticals,
            slashes=self.slashes,
            max_verticals=int(self.verticals.max()),
            max_slashes=int(self.slashes.max()),
            **settings,
        )


def load_budgets(path: str | os.PathLike) -> FixedBudgets:
    """Reads budgets from a MInference file.

    The file is a JSON list with one entry a layer: an object from head number to
    `[type, verticals, slashes, score]`, or a list of these. Type and score are not used (every
    head is treated as vertical-slash, as the reference does).

    Raises:
        UserError: if the file cannot be read, or naming the layer and head that is wrong.
    """
    try:
        with open(path, encoding="utf-8") as file:
            layers = json.load(file)
    except OSError as error:
        raise UserError(f"budget file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"budget file {path} is not JSON: {error}") from error
    if not isinstance(layers, list) or not layers:
        raise UserError(f"budget file {path} must be a list with one entry a layer")
    rows = [_read_layer(layer, f"budget file {path}, layer {i}") for i, layer in enumerate(layers)]
    for i, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise UserError(
                f"budget file {path}, layer {i} has {len(row)} heads but layer 0 has {len(rows[0])}"
            )
    table = np.array(rows, np.int32)
    return FixedBudgets(verticals=table[..., 0], slashes=table[..., 1])


def _read_layer(layer, where: str) -> list[tuple[int, int]]:
    if isinstance(layer, dict):
        names = [str(head) for head in range(len(layer))]
        missing = [name for name in names if name not in layer]
        if missing:
            raise UserError(f"{where} has {len(layer)} heads but none numbered {missing[0]}")
        layer = [layer[name] for name in names]
    if not isinstance(layer, list) or not layer:
        raise UserError(f"{where} must be an object or a list with one entry a head")
    return [_read_head(entry, f"{where}, head {head}") for head, entry in enumerate(layer)]


def _read_head(entry, where: str) -> tuple[int, int]:
    if not isinstance(entry, list) or len(entry) < 3:
        raise UserError(f"{where} is {entry!r}; it must be [type, verticals, slashes, score]")
    budgets = entry[1:3]
    if any(isinstance(budget, list) for budget in budgets):
        raise UserError(
            f"{where} holds [top_p, cap] pairs, not fixed budgets; use kind 'vertical_slash' with "
            "top_p, max_verticals and max_slashes for these"
        )
    for budget in budgets:
        if isinstance(budget, bool) or not isinstance(budget, int) or not 0 <= budget < 2**31:
            raise UserError(f"{where} has budget {budget!r}; it must be a whole number, 0 or more")
    return budgets[0], budgets[1]
