"""Files with fixed budgets in the format of MInference (arXiv 2407.02490)."""

import os
from pathlib import Path

from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.file_limits import read_json

# Type and two numbers; for vertical_and_slash the number of verticals and of slashes.
Head = tuple[str, int, int]


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
