"""Audit metrics as part of a step's record and as text."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mtraining_jax.reporting.record import Record


def _large(x: np.ndarray) -> np.ndarray:
    return x


def _small(x: np.ndarray) -> np.ndarray:
    return -x


def _far_from_one(x: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.abs(np.log(x))


# Metrics per layer and head, with a function that ranks values from good to bad.
FIGURES = {
    "recall": _small,
    "output_error": _large,
    "local_gradient_cosine": _small,
    "local_gradient_ratio": _far_from_one,
    "index_gap": _large,
    "starved_keys": _large,
    "starved_mass": _large,
}

# Suffix of metrics with a value per head: too many for curves.
PER_HEAD = "_per_head"


def audit_record(figures: Mapping[str, np.ndarray], compared: Mapping[str, np.ndarray]) -> Record:
    """JSON-serializable metrics of an audit, merged into the step's record.

    Args:
        figures: metrics by name, fp32 [L, Hq] each; NaN if not measured.
        compared: from `make_gradient_comparison`, and gradient_seconds; empty without it.

    Returns:
        For each metric NAME in `figures`: NAME (mean over layers and heads), NAME_per_layer,
        NAME_worst, NAME_worst_per_layer and NAME_per_head (nested lists, four digits). `compared`
        keeps its names. None replaces non-finite values.
    """
    record: Record = {}
    for name, values in figures.items():
        values = np.asarray(values, np.float64)
        known = np.isfinite(values)
        bad = np.where(known, FIGURES[name](values), -np.inf)
        of_layers = np.take_along_axis(values, bad.argmax(1)[:, None], 1)[:, 0]
        sums = np.where(known, values, 0).sum(1)
        with np.errstate(invalid="ignore", divide="ignore"):
            per_layer = sums / known.sum(1)
            mean = sums.sum() / known.sum()
        record[name] = _number(mean)
        record[f"{name}_per_layer"] = list(map(_number, per_layer))
        record[f"{name}_worst"] = _number(of_layers[bad.max(1).argmax()])
        record[f"{name}_worst_per_layer"] = list(map(_number, of_layers))
        record[name + PER_HEAD] = [[_number(x, 4) for x in row] for row in values]
    for name, value in compared.items():
        value = np.asarray(value, np.float64)
        record[name] = list(map(_number, value)) if value.ndim else _number(value)
    return record


def worst_head(record: Record, name: str) -> tuple[int, int] | None:
    """Layer and head of the worst value of a metric; None if there is none."""
    values = np.array(record[name + PER_HEAD], np.float64)
    if not np.isfinite(values).any():
        return None
    layer, head = np.unravel_index(np.nanargmax(FIGURES[name](values)), values.shape)
    return int(layer), int(head)


def audit_text(record: Record) -> list[str]:
    """Parts of a step's log line about its audit, if any."""
    parts = []
    if record.get("recall") is not None:
        worst = f"worst head {record['recall_worst']:.1%}"
        # A pattern may report its own recall, without heads.
        if "recall" + PER_HEAD in record and (at := worst_head(record, "recall")) is not None:
            worst += f", layer {at[0]} head {at[1]}"
        parts.append(f"recall {record['recall']:.1%} ({worst})")
    for name, text, form in (
        ("output_error", "output error", ".1%"),
        ("local_gradient_cosine", "query gradient cosine", ".3f"),
        ("index_gap", "index gap", ".3f"),
        ("starved_mass", "starved mass", ".2%"),
        ("global_gradient_cosine", "gradient cosine", ".4f"),
    ):
        if record.get(name) is not None:
            parts.append(f"{text} {record[name]:{form}}")
    return parts


def _number(value: Any, digits: int = 0) -> float | None:
    value = float(value)
    if not np.isfinite(value):
        return None
    return float(f"{value:.{digits}g}") if digits else value
