"""UTF-8 text files."""

from collections.abc import Iterator

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
