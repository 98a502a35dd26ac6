"""A configuration file may begin with another one: `base = "qwen3b_512k"`, or a path."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mtraining_jax.config.fields import toml_value
from mtraining_jax.errors import UserError

Table = dict[str, Any]


def read_with_base(
    path: Path, read: Callable[[Path], Table], find: Callable[[str], Path]
) -> tuple[Table, dict[str, str]]:
    """Reads a file and what it is based on; the values of the file win.

    Tables are merged field by field. The name of the run is not taken from a base: it names a
    folder.

    Args:
        path: of the file.
        read: from a path to the table in it.
        find: from the name of a configuration to its file.

    Returns:
        The table, without `base`, and for fields that the file does not set itself the file they
        come from: paths by dotted name.

    Raises:
        UserError: a base that does not exist, cannot be read or leads back to a file before it.
    """
    return _read(path, read, find, ())


def _read(
    path: Path,
    read: Callable[[Path], Table],
    find: Callable[[str], Path],
    before: tuple[Path, ...],
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
        # Of a path, as in the file's folder: it means the same wherever the command runs.
        base = path.parent / Path(name).expanduser() if is_path else find(name)
        if base.resolve() in [file.resolve() for file in chain]:
            files = " -> ".join(str(file) for file in (*chain, base))
            raise UserError(f"the files lead back to where they began, {files}")
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
    """Adds to a table the fields that it lacks, and notes where each comes from."""
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
