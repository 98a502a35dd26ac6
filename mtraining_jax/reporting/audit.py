"""The figures of an audit as numbers of a record, and in a line of text."""

from collections.abc import Mapping

import numpy as np

from mtraining_jax.reporting.record import Record

# Figures for each layer and head, and which end of them is the worst.
FIGURES = {
    "recall": "least",
    "output_error": "most",
    "local_gradient_cosine": "least",
    "local_gradient_ratio": "least",
    "index_gap": "most",
    "starved_keys": "most",
    "starved_mass": "most",
}

# Ends the names of lists of lists: for tools, too many for curves.
PER_HEAD = "_per_head"


def audit_record(
    figures: Mapping[str, np.ndarray], compared: Mapping[str, np.ndarray]
) -> Record:
    """What an audit found in numbers that JSON can hold; it joins the step's record.

    Args:
        figures: by name, fp32 [L, Hq] each, NaN where there was nothing to measure.
        compared: of `make_gradient_comparison`; empty without it.

    Returns:
        For each figure NAME, its mean over layers and heads, NAME_per_layer, NAME_worst,
        NAME_worst_per_layer and NAME_per_head, a list of lists of four digits. What was compared
        keeps its names. None where there is no number.
    """
    record: Record = {}
    for name, values in figures.items():
        values = np.asarray(values, np.float64)
        known = np.isfinite(values)
        worst = np.fmin if FIGURES[name] == "least" else np.fmax
        sums = np.where(known, values, 0).sum(1)
        with np.errstate(invalid="ignore", divide="ignore"):
            per_layer = sums / known.sum(1)
            mean = sums.sum() / known.sum()
        record[name] = _number(mean)
        record[f"{name}_per_layer"] = list(map(_number, per_layer))
        of_layers = worst.reduce(values, axis=1)
        record[f"{name}_worst"] = _number(worst.reduce(of_layers))
        record[f"{name}_worst_per_layer"] = list(map(_number, of_layers))
        record[name + PER_HEAD] = [[_number(x, 4) for x in row] for row in values]
    for name, value in compared.items():
        value = np.asarray(value, np.float64)
        record[name] = list(map(_number, value)) if value.ndim else _number(value)
    return record


def worst_head(record: Record, name: str) -> tuple[int, int] | None:
    """Layer and head of the worst value of a figure; None if there is no number."""
    values = np.array(record[name + PER_HEAD], np.float64)
    if not np.isfinite(values).any():
        return None
    signed = values if FIGURES[name] == "least" else -values
    layer, head = np.unravel_index(np.nanargmin(signed), values.shape)
    return int(layer), int(head)


def audit_text(record: Record) -> list[str]:
    """What a line about a step says of its audit; nothing without one."""
    parts = []
    if record.get("recall") is not None:
        worst = f"worst head {record['recall_worst']:.1%}"
        if "recall" + PER_HEAD in record:  # a pattern may report a recall of its own
            worst += ", layer {} head {}".format(*worst_head(record, "recall"))
        parts.append(f"recall {record['recall']:.1%} ({worst})")
    for name, text, form in (
        ("output_error", "output error", ".1%"),
        ("local_gradient_cosine", "gradient cosine of queries", ".3f"),
        ("index_gap", "index gap", ".3f"),
        ("starved_mass", "starved mass", ".2%"),
        ("global_gradient_cosine", "gradient cosine", ".4f"),
    ):
        if record.get(name) is not None:
            parts.append(f"{text} {record[name]:{form}}")
    return parts


def _number(value: float, digits: int = 0) -> float | None:
    value = float(value)
    if not np.isfinite(value):
        return None
    return float(f"{value:.{digits}g}") if digits else value
