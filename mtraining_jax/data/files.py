"""Resolves paths to sorted lists of files; opens compressed files; helpers for error messages."""

import bz2
import contextlib
import glob
import gzip
import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import shortened
from mtraining_jax.utils.file_limits import absence, is_url

_LONGEST_NAME = 255  # bytes, in common file systems
# Compression formats, and the first bytes of their files.
COMPRESSIONS = {"gz": b"\x1f\x8b", "bz2": b"BZh", "zstd": b"\x28\xb5\x2f\xfd"}


def find_files(
    paths: Sequence[str], suffixes: Sequence[str], field: str = "data.paths"
) -> list[Path]:
    """Lists files without duplicates: in the order of ``paths``, sorted within each entry.

    An entry is a file, a folder (searched recursively for suffixes, except hidden files) or a glob
    (``**`` crosses folders). Empty files are errors; without suffixes, folders and globs skip them.
    """
    files: dict[Path, None] = {}
    for entry in paths:
        path, kind = Path(entry).expanduser(), ""
        if path.is_dir():
            found = _in_folder(path, suffixes)
            kind = " " + " or ".join(f"*{suffix}" for suffix in suffixes) if suffixes else ""
        else:
            found = [match for match in _matches(entry, field) if match.is_file()]
        if not found:
            raise UserError(f'{field}: "{entry}" has no file{kind}')
        for file in found:
            if file.stat().st_size > 0:
                files[file] = None
            elif suffixes or file == path:
                raise UserError(f"{field}: {file} is empty")
    if not files:
        raise UserError(f"{field}: {', '.join(paths)}: all files are empty")
    return list(files)


def named_files(options: Mapping[str, Any]) -> list[Path]:
    """The existing files that values of options name."""
    paths = [os.path.expanduser(x) for x in options.values() if isinstance(x, str)]
    return [Path(path) for path in paths if os.path.isfile(path)]  # False for any text


def find_folders(paths: Sequence[str]) -> list[Path]:
    """Lists folders without duplicates: in the order of ``paths``, sorted within a glob."""
    folders: dict[Path, None] = {}
    for entry in paths:
        matches = _matches(entry, "data.paths")
        found = [match for match in matches if match.is_dir()]
        if not found:
            problem = "is not a folder" if matches else "matches no folder"
            raise UserError(f'data.paths: "{entry}" {problem}')
        folders |= dict.fromkeys(found)
    return list(folders)


def inside(folder: Path, name: str, origin: Path) -> Path:
    """Joins a folder and an untrusted file name from `origin`, which must not leave the folder."""
    path = Path(name)  # symbolic links may leave it: their creator has access to the target anyway
    longest = max((len(part.encode("utf-8", "surrogatepass")) for part in path.parts), default=0)
    if longest > _LONGEST_NAME:
        raise UserError(f'{origin} names "{name[:32]}...", which is too long for a file name')
    if not name or "\0" in name or path.is_absolute() or ".." in path.parts or "\\" in name:
        raise UserError(f'{origin} names "{name}", which must be a file in the same folder')
    return folder / path


def _matches(entry: str, field: str) -> list[Path]:
    """The file or folder itself, or the matches of a glob."""
    path = Path(entry).expanduser()
    if (problem := absence(entry)) is None:
        return [path]
    if glob.has_magic(entry) and not is_url(entry):
        return sorted(map(Path, glob.glob(str(path), recursive=True)))
    raise UserError(f'{field}: "{entry}" {problem}')


def _in_folder(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and (not suffixes or path.name.endswith(tuple(suffixes)))
        and path.is_file()
    )


def open_compressed(path: Path, compression: str | None) -> Any:
    """Opens a file to read its uncompressed bytes; None for a file that is not compressed.

    Damaged files raise any kind of exception.
    """
    if compression == "zstd":
        problem = (
            f"{path} is compressed with zstd and needs the package backports-zstd: pip install "
            "backports-zstd, or uv run --extra zstd"
        )
        with errors_as(UserError, problem, ImportError):
            since_3_14 = sys.version_info >= (3, 14)
            zstd = importlib.import_module(f"{'compression' if since_3_14 else 'backports'}.zstd")
        return zstd.open(path)
    return {"gz": gzip.open, "bz2": bz2.open, None: open}[compression](path, "rb")


def shown_names(names: Iterable[str]) -> str:
    """The first names of fields or columns, for an error message."""
    names = [f'"{shortened(name, 40)}"' for name in names]
    shown = ", ".join(names[:8]) or "no fields"
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown


@contextlib.contextmanager
def errors_as(kind: type[Exception], problem: str, *errors: type[Exception]) -> Iterator[None]:
    """Raises `kind` instead of these errors, with their reason: "PROBLEM (REASON)"."""
    try:
        yield
    except (UserError, kind):
        raise
    except errors as error:
        raise kind(f"{problem} ({reason(error)})") from error


def reason(error: Exception) -> str:
    """The start of an error message, one line without a final period, error number and path."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return shortened(text.splitlines()[0].rstrip("."), 200) if text else type(error).__name__
