"""From paths, folders and globs to a sorted list of files, and words about their content."""

import glob
from collections.abc import Iterable, Sequence
from pathlib import Path

from mtraining_jax.errors import UserError

# Bytes that file systems have room for.
_LONGEST_NAME = 255


def find_files(
    paths: Sequence[str], suffixes: Sequence[str], field: str = "data.paths"
) -> list[Path]:
    """Lists the files that ``paths`` means, in an order that every process agrees on.

    Files come in the order of ``paths``; those of one folder or glob are sorted by name. A file
    that two entries name is read once. Files whose name begins with a dot are found only when
    they are named.

    Args:
        paths: files, folders (searched with their subfolders) or globs (``**`` crosses folders).
        suffixes: of the files that a folder is searched for; empty takes every file.
        field: where the paths come from, for messages.

    Returns:
        The files, none of them empty. An empty file is an error, except where any file is taken:
        an empty one that a folder or a glob found is then left out.

    Raises:
        UserError: a path that is missing or finds nothing, or an empty file.
    """
    files: dict[Path, None] = {}
    for entry in paths:
        path = Path(entry).expanduser()
        if path.is_file():
            found, named = [path], True
        elif path.is_dir():
            found, named = _in_folder(path, suffixes), False
        elif glob.has_magic(entry):
            matches = (Path(m) for m in glob.glob(str(path), recursive=True))
            found, named = sorted(m for m in matches if m.is_file()), False
        else:
            raise UserError(f'{field}: "{entry}" does not exist')
        if not found:
            wanted = " or ".join(f"*{suffix}" for suffix in suffixes)
            kind = f" {wanted}" if path.is_dir() and wanted else ""
            raise UserError(f'{field}: "{entry}" holds no file{kind}')
        for file in found:
            if file.stat().st_size > 0:
                files[file] = None
            elif named or suffixes:
                raise UserError(f"{field}: {file} is empty")
    if not files:
        raise UserError(f"{field}: {', '.join(paths)} hold nothing but empty files")
    return list(files)


def find_folders(paths: Sequence[str], field: str = "data.paths") -> list[Path]:
    """Lists the folders that ``paths`` means, each once; those of one glob are sorted by name.

    Args:
        paths: folders or globs (``**`` crosses folders).
        field: where the paths come from, for messages.

    Raises:
        UserError: a path that is missing, or no folder.
    """
    folders: dict[Path, None] = {}
    for entry in paths:
        path = Path(entry).expanduser()
        found = [path]
        if not path.exists() and glob.has_magic(entry):
            matches = (Path(match) for match in glob.glob(str(path), recursive=True))
            found = sorted(match for match in matches if match.is_dir())
            if not found:
                raise UserError(f'{field}: "{entry}" finds no folder')
        for folder in found:
            if not folder.exists():
                raise UserError(f'{field}: "{entry}" does not exist')
            if not folder.is_dir():
                raise UserError(f'{field}: "{entry}" is no folder')
            folders[folder] = None
    return list(folders)


def inside(folder: Path, name: str, told_by: Path) -> Path:
    """A file of a folder by the name that another file tells, which must not lead out of it.

    A link in the folder may lead elsewhere: whoever made it can read that anyway.

    Raises:
        UserError: an absolute name, one with "..", or a longer one than files have.
    """
    path = Path(name)
    longest = max((len(part.encode("utf-8", "surrogatepass")) for part in path.parts), default=0)
    if longest > _LONGEST_NAME:
        raise UserError(
            f'{told_by} names "{name[:32]}...", which is longer than the name of a file can be'
        )
    if not name or "\0" in name or path.is_absolute() or ".." in path.parts or "\\" in name:
        raise UserError(f'{told_by} names "{name}", which is not a file of its folder')
    return folder / path


def _in_folder(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and (not suffixes or path.name.endswith(tuple(suffixes)))
        and path.is_file()
    )


def shown_names(names: Iterable[str]) -> str:
    """Names of fields or columns, the first of them, for a message."""
    names = [f'"{name}"' for name in names]
    shown = ", ".join(names[:8]) or "no fields"
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown


def first_line(error: BaseException) -> str:
    """The message of a library's error, cut to one line without its last full stop."""
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
