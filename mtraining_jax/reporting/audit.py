"""Audit metrics as part of a step's record and as text."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mtraining_jax.callbacks import Record

# Metrics per layer and head, with a function that ranks values from good to bad.
FIGURES = {
    "recall": np.negative,
    "output_error": np.positive,
    "local_gradient_cosine": np.negative,
    "local_gradient_ratio": lambda ratio: np.abs(np.log(ratio)),
    "index_gap": np.positive,
    "starved_keys": np.positive,
    "starved_mass": np.positive,
}

# Suffix of metrics with a value per head: too many for curves.
PER_HEAD = "_per_head"


def audit_record(figures: Mapping[str, np.ndarray]) -> Record:
    """JSON-serializable metrics of an audit, merged into the step's record.

    `figures` are fp32 [L, Hq] by NAME; NAME_per_head has four digits. None replaces non-finite
    values.
    """
    record: Record = {}
    for name, values in figures.items():
        values = np.asarray(values, np.float64)
        known = np.isfinite(values)
        bad = _badness(name, values)
        worst = np.take_along_axis(values, bad.argmax(1)[:, None], 1)[:, 0]
        sums = np.where(known, values, 0).sum(1)
        with np.errstate(invalid="ignore", divide="ignore"):
            record[name] = _number(sums.sum() / known.sum())
            record[f"{name}_per_layer"] = list(map(_number, sums / known.sum(1)))
        record[f"{name}_worst"] = _number(worst[bad.max(1).argmax()])
        record[f"{name}_worst_per_layer"] = list(map(_number, worst))
        record[name + PER_HEAD] = [[_number(x, 4) for x in row] for row in values]
    return record


def worst_head(record: Record, name: str) -> tuple[int, int] | None:
    """Layer and head of the worst value of a metric; None if there is none."""
    values = np.array(record[name + PER_HEAD], np.float64)
    if not np.isfinite(values).any():
        return None
    layer, head = np.unravel_index(_badness(name, values).argmax(), values.shape)
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
    ):
        if record.get(name) is not None:
            parts.append(f"{text} {record[name]:{form}}")
    return parts


def _badness(name: str, values: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.where(np.isfinite(values), FIGURES[name](values), -np.inf)


def _number(value: Any, digits: int = 0) -> float | None:
    value = float(value)
    if not np.isfinite(value):
        return None
    return float(f"{value:.{digits}g}") if digits else value
