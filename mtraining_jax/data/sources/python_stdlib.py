"""Python's own library: text that every machine has."""

import os
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mtraining_jax.data.documents import DocumentSource
from mtraining_jax.errors import UserError

# Tests hold broken encodings on purpose and are missing from many distributions.
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True, kw_only=True)
class PythonStdlib(DocumentSource):
    """Sources of the running Python's standard library: one document a file."""

    def documents(self) -> Iterator[tuple[str, str]]:
        """As of `DocumentSource`; each file is read in the encoding that it declares."""
        for path in library_files():
            try:
                with tokenize.open(path) as file:
                    text = file.read()
            except (OSError, UnicodeDecodeError, SyntaxError) as error:
                raise UserError(f"{path} cannot be read as Python source ({error})") from error
            yield str(path), text


def library_files() -> list[Path]:
    """Lists the ``.py`` files of the standard library, sorted by module path.

    Returns:
        The files, without tests, installed packages and the build settings of this machine.

    Raises:
        UserError: this Python came without sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        files += [
            Path(folder, name)
            for name in names
            if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    if not files:
        raise UserError(
            f'data.source = "python_stdlib" finds no .py files under {root}; "text" reads others'
        )
    return sorted(files, key=lambda path: path.parts)
