"""Former names of fields, still accepted in files and checkpoints."""

from collections.abc import Mapping
from typing import Any

RENAMED = {"metrics.recall_every": "audit.every_steps", "metrics.recall_rows": "audit.rows"}


def with_new_names(table: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces former field names; a field given by both names keeps both, which is an error."""
    found = dict(table)
    for old, new in RENAMED.items():
        (section, name), (new_section, new_name) = old.split("."), new.split(".")
        values, others = found.get(section), found.get(new_section, {})
        if not isinstance(values, dict) or not isinstance(others, dict):
            continue
        if name in values and new_name not in others:
            found[section] = {key: value for key, value in values.items() if key != name}
            found[new_section] = {**others, new_name: values[name]}
    return found
