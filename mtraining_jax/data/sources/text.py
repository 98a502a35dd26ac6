"""Text files: UTF-8 files, and Python's standard library, without a download."""

import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from mtraining_jax.data.documents import DocumentSource
from mtraining_jax.data.files import errors_as
from mtraining_jax.data.source import FileSource
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import options


@options(kw_only=True)
class TextFiles(FileSource, DocumentSource):
    """UTF-8 text files, one document per file; folders may have files with any suffix."""

    def documents(self) -> Iterator[tuple[str, str]]:
        for path in self.files():
            with errors_as(UserError, f"data.paths: {path} cannot be read", OSError):
                content = path.read_bytes()
            try:
                text = content.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"data.paths: {path} is not UTF-8 text (byte {error.start}); convert it, or "
                    'decompress it if it is compressed (data.source = "jsonl" reads .gz files)'
                ) from error
            yield str(path), text


# Tests have invalid encodings on purpose and are missing in many distributions.
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@options(kw_only=True)
class PythonStdlib(DocumentSource):
    """Source files of Python's standard library, one document per file."""

    def inputs(self) -> list[Path]:
        return library_files()

    def documents(self) -> Iterator[tuple[str, str]]:
        for path in library_files():
            problem = f"{path} cannot be read as Python source"
            with errors_as(UserError, problem, OSError, UnicodeDecodeError, SyntaxError):
                with tokenize.open(path) as file:
                    text = file.read()
            yield str(path), text


def library_files() -> list[Path]:
    """The sorted ``.py`` files of the standard library, without tests and generated files."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, folders, names in root.walk():
        folders[:] = [name for name in folders if name not in _SKIPPED]
        sources = [name for name in names if name.endswith(".py")]
        files += [folder / name for name in sources if not name.startswith("_sysconfigdata")]
    return sorted(files, key=lambda path: path.parts)
