"""Fields that had another name before: files and checkpoints that say it still mean the same."""

from collections.abc import Mapping
from typing import Any

RENAMED = {
    "metrics.recall_every": "audit.every_steps",
    "metrics.recall_rows": "audit.rows",
}


def with_new_names(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table of values by section and field, with the names of today.

    A field that is given by both of its names keeps the old one too, which is then unknown.
    """
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
