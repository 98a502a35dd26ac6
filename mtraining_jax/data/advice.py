"""Hints about data, printed before it is read."""

from typing import TYPE_CHECKING

from mtraining_jax.data.documents import DocumentSource
from mtraining_jax.data.source import FileSource
from mtraining_jax.data.sources import selected_source

if TYPE_CHECKING:
    from mtraining_jax.config import DataConfig

# Bytes that take minutes: a tokenizer processes a few MB/s.
LARGE = 2**28


def slow_start(data: "DataConfig") -> str | None:
    """A hint to pre-tokenize a large corpus, which otherwise every process tokenizes at startup."""
    source = selected_source(data)
    if not isinstance(source, DocumentSource) or not isinstance(source, FileSource):
        return None
    size = source.size()
    if size <= LARGE:
        return None
    what = "copies" if source.holds_ids else "tokenizes"
    return (
        f"every process of every run {what} data.paths ({size / 2**20:,.0f} MiB) at startup; to "
        "pre-tokenize it, see python -m mtraining_jax.cli.tokenize_corpus --help"
    )
