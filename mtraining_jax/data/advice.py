"""What to say about data before it is read."""

from typing import TYPE_CHECKING

from mtraining_jax.data.documents import DocumentSource
from mtraining_jax.data.source import FileSource
from mtraining_jax.data.sources import selected_source

if TYPE_CHECKING:
    from mtraining_jax.config import DataConfig

# From here on it takes minutes: a tokenizer makes a few megabytes of text a second into tokens.
LARGE = 2**28


def slow_start(data: "DataConfig") -> str | None:
    """A line on a corpus that every process of every run would tokenise; None if it is small.

    Args:
        data: the section.

    Raises:
        UserError: the files cannot be found.
    """
    source = selected_source(data)
    if not isinstance(source, DocumentSource) or not isinstance(source, FileSource):
        return None
    size = source.size()
    if size <= LARGE:
        return None
    what = "copies" if source.holds_ids else "tokenises"
    return (
        f"data.paths holds {size / 2**20:,.0f} MiB, which each process of each run {what} at its "
        "start; once and for all does it: python -m mtraining_jax.tokenize --help"
    )
