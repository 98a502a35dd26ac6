"""From paths, folders and globs to a sorted list of files."""

import glob
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from mtraining_jax.errors import UserError

# What a folder is searched for. Text takes every file that is not hidden.
_SUFFIXES = {"jsonl": (".jsonl",), "parquet": (".parquet",), "tokens": (".npy", ".bin")}
# Tests hold broken encodings on purpose and are missing from many distributions.
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def find_files(paths: Sequence[str], source: str) -> list[Path]:
    """Lists the files that ``data.paths`` means, in an order that every process agrees on.

    Files come in the order of ``paths``; those of one folder or glob are sorted by name. A file
    that two entries name is read once. Files whose name begins with a dot are found only when
    they are named.

    Args:
      paths: files, folders (searched with their subfolders) or globs (``**`` crosses folders).
      source: the kind of data, which decides the suffixes a folder is searched for.

    Returns:
      The files, none of them empty. An empty text file is left out when a folder or a glob
      found it; it is an error when it is named, as is any other empty file.

    Raises:
      UserError: a path that is missing or finds nothing, or an empty file.
    """
    files: dict[Path, None] = {}
    for entry in paths:
        path = Path(entry).expanduser()
        if path.is_file():
            found, named = [path], True
        elif path.is_dir():
            found, named = _in_folder(path, source), False
        elif glob.has_magic(entry):
            matches = (Path(m) for m in glob.glob(str(path), recursive=True))
            found, named = sorted(m for m in matches if m.is_file()), False
        else:
            raise UserError(f"data.paths: {entry!r} does not exist.")
        if not found:
            wanted = " or ".join(f"*{s}" for s in _SUFFIXES.get(source, ("",)))
            raise UserError(f"data.paths: {entry!r} holds no file ({wanted}).")
        for file in found:
            if file.stat().st_size > 0:
                files[file] = None
            elif named or source != "text":
                raise UserError(f"data.paths: {file} is empty.")
    return list(files)


def python_stdlib_files() -> list[Path]:
    """Lists the ``.py`` sources of the running Python's standard library, sorted by module path.

    Returns:
      The files, without tests, installed packages and the build settings of this machine.

    Raises:
      UserError: this Python came without sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        (path.relative_to(root).parts, path)
        for path in root.rglob("*.py")
        if not _STDLIB_SKIPPED.intersection(path.relative_to(root).parts)
        and not path.name.startswith("_sysconfigdata")
    )
    if not files:
        raise UserError(
            f"data.source 'python_stdlib' found no .py files under {root}; use source 'text'."
        )
    return [path for _, path in files]


def _in_folder(folder: Path, source: str) -> list[Path]:
    suffixes = _SUFFIXES.get(source)
    return sorted(
        path
        for path in folder.rglob("*")
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and (suffixes is None or path.suffix in suffixes)
        and path.is_file()
    )
