"""What a run folder says about its run: when, where and how it was started, and of what size."""

import contextlib
import datetime
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtraining_jax.models.families import FAMILIES
from mtraining_jax.models.spec import ModelSpec
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import shortened
from mtraining_jax.utils.file_limits import read_text
from mtraining_jax.utils.text import counted, with_unit

_LONGEST = 1000  # characters of a value


def about(folder: Path) -> dict[str, str]:
    """Facts from starts.jsonl and config.toml by label, as far as these files have them.

    Imports no plug-ins that the configuration names: the folder may come from somebody else.
    """
    starts = _starts(folder / "starts.jsonl")
    facts: dict[str, str | None] = {}
    if starts:
        facts["started"] = _date(starts[0])
        if len(starts) > 1:
            facts["restarts"] = str(len(starts) - 1)
        facts["devices"] = _devices(starts[-1])
        versions = _section(starts[-1], "versions")
        known = [name for name in ("mtraining-jax", "jax") if name in versions]
        facts["versions"] = ", ".join(f"{name} {versions[name]}" for name in known)
        facts["command"] = _text(starts[-1].get("command"))
    config = _config(folder)
    facts["model"] = _model(config)
    facts["attention"] = _text(_section(config, "sparsity").get("kind"))
    if isinstance(tokens := _section(config, "data").get("seq_len"), int):
        facts["sequence"] = f"{tokens:,} tokens"
    return {name: shortened(text, _LONGEST) for name, text in facts.items() if text}


def differences(folders: Sequence[Path]) -> dict[str, list[str]]:
    """The values of configurations that differ, by dotted name: one for each folder, or ""."""
    tables = []
    for folder in folders:
        config = _config(folder)
        sections = {name: _section(config, name) for name in config}
        tables.append({f"{x}.{y}": str(sections[x][y]) for x in sections for y in sections[x]})
    names = dict.fromkeys(name for table in tables for name in table if name != "run.name")
    rows = {name: [shortened(x.get(name, ""), _LONGEST) for x in tables] for name in names}
    return {name: row for name, row in rows.items() if len(set(row)) > 1}


def _config(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, UserError, ValueError, RecursionError):
        config = tomllib.loads(read_text(folder / "config.toml"))
        str(config)  # of tables that are not too deep
        return config
    return {}


def _starts(path: Path) -> list[dict[str, Any]]:
    found = []
    with contextlib.suppress(OSError, UserError, UnicodeDecodeError):
        for line in read_text(path).splitlines():
            with contextlib.suppress(ValueError, RecursionError):  # such as a half-written line
                if isinstance(start := json.loads(line), dict):
                    found.append(start)
    return found


def _date(start: dict[str, Any]) -> str | None:
    with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
        time = datetime.datetime.fromisoformat(start["time"]).astimezone(datetime.UTC)
        return time.strftime("%Y-%m-%d %H:%M UTC")
    return None


def _devices(start: dict[str, Any]) -> str | None:
    devices, processes = _section(start, "devices"), start.get("processes")
    if not devices:
        return None
    text = ", ".join(f"{count} x {kind}" for kind, count in devices.items())
    if isinstance(processes, int) and processes > 1:
        text += f", {counted(processes, 'process')}"
    return text


def _model(config: dict[str, Any]) -> str | None:
    values = _section(config, "model")
    family = _text(values.get("family"))
    if family not in FAMILIES.names:
        return family
    try:
        table = ModelSpec.from_config(values).parameters
        return f"{family}, {with_unit(sum(x.size for x in table.values()))} parameters"
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return family


def _section(table: dict[str, Any], name: str) -> dict[str, Any]:
    found = table.get(name)
    return found if isinstance(found, dict) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
