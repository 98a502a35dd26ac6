"""Inheritance of configuration files: `base = "qwen3b_512k"`, or a path."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mtraining_jax.config.fields import toml_value
from mtraining_jax.utils.errors import UserError

Table = dict[str, Any]


def read_with_base(
    path: Path, read: Callable[[Path], Table], find: Callable[[str], Path]
) -> tuple[Table, dict[str, str]]:
    """Reads a file and its chain of base files, merged field by field; derived files win.

    `run.name` is not inherited: every file has its own run folder.

    Returns:
        The table without `base`, and the origin of inherited fields: file paths by dotted name.
    """
    return _read(path, read, find, ())


def _read(
    path: Path, read: Callable[[Path], Table], find: Callable[[str], Path], before: tuple[Path, ...]
) -> tuple[Table, dict[str, str]]:
    table = read(path)
    if "base" not in table:
        return table, {}
    name = table.pop("base")
    what = f"{path}: base = {toml_value(name) if isinstance(name, str) else name}"
    if not isinstance(name, str) or not name:
        raise UserError(
            f"{what} is not allowed: it must be the name of a configuration or the path of a TOML "
            "file"
        )
    chain = (*before, path)
    try:
        is_path = name.endswith(".toml") or len(Path(name).parts) > 1
        # Relative to the file's folder, independent of the working directory.
        base = path.parent / Path(name).expanduser() if is_path else find(name)
        if base.resolve() in [file.resolve() for file in chain]:
            files = " -> ".join(str(file) for file in (*chain, base))
            raise UserError(f"the base files form a cycle: {files}")
        below, origins = _read(base, read, find, chain)
    except UserError as error:
        raise UserError(f"{what}: {error}") from None
    if isinstance(below.get("run"), dict):
        below["run"].pop("name", None)
    found: dict[str, str] = {}
    _merge(table, below, "", lambda dotted: origins.get(dotted, str(base)), found)
    return table, found


def _merge(
    table: Table, below: Table, prefix: str, origin: Callable[[str], str], found: dict[str, str]
) -> None:
    """Adds missing fields to a table and records their origin."""
    for key, value in below.items():
        dotted = f"{prefix}{key}"
        if key in table and not (isinstance(table[key], dict) and isinstance(value, dict)):
            continue
        if key not in table:
            found[dotted] = origin(dotted)
            if not isinstance(value, dict):
                table[key] = value
                continue
            table[key] = {}
        _merge(table[key], value, f"{dotted}.", origin, found)
