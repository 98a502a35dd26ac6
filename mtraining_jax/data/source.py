"""The interface of data sources.

A source is registered in `sources/__init__.py` or passed as `--data.source=package.module:Class`.
Configurations import all sources, so their modules must not import slow packages at the top (JAX,
pyarrow).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from mtraining_jax.data.corpus import Corpus
from mtraining_jax.data.files import find_files
from mtraining_jax.data.spec import DataSpec
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.limits import TextList


@options(kw_only=True)
class Source:
    """Base class of data sources, decorated with `options`: options of `[data]` as fields.

    Options of all sources (`seq_len`, `mode`, `eos`, ...) are passed to the methods.
    """

    modes: ClassVar[tuple[str, ...]] = ("concat", "exact")  # supported values of `data.mode`

    def problems(self, data: DataSpec, vocab_size: int) -> Iterator[str]:
        """Yields problems of the options, without opening files; subclasses add to these."""
        if data.mode not in self.modes:
            allowed = " or ".join(f'"{mode}"' for mode in self.modes)
            yield (
                f'data.mode = "{data.mode}" is not possible with data.source = "{data.source}": it '
                f"must be {allowed}"
            )
        for name, value in (("eos", data.eos), ("bos", data.bos)):
            if isinstance(value, int) and value >= vocab_size:
                yield (
                    f"data.{name} = {value} is outside the vocabulary: model.vocab_size = "
                    f"{vocab_size}"
                )

    def has_lengths(self, data: DataSpec) -> bool:
        """Whether `open` knows document lengths without reading documents (used by dry runs)."""
        return False

    @property
    def holds_ids(self) -> bool:
        """Whether the data is token ids, so that no tokenizer is needed."""
        return True

    @property
    def is_chat(self) -> bool:
        """Whether the data is conversations, which begin and end as their template says."""
        return False

    def recorded_bos(self) -> tuple[int, ...] | None:
        """Ids that begin the documents of pre-tokenized data, if it records them."""
        return None

    @property
    def sources(self) -> "list[Source]":
        """The sources of the documents: itself, or those of its parts."""
        return [self]

    def open(self, data: DataSpec, vocab_size: int) -> Corpus:
        """Opens the source; called once, after `problems`, with the same result in all processes.

        Raises UserError if the source is unreadable or too small, or has ids above `vocab_size`.
        """
        raise NotImplementedError(f"{type(self).__name__}.open")


@options(kw_only=True)
class FileSource(Source):
    """A source that reads files."""

    paths: TextList = ()
    """Files, folders or glob patterns to read."""
    suffixes: ClassVar[tuple[str, ...]] = ()  # of files in folders; empty accepts all

    def problems(self, data: DataSpec, vocab_size: int) -> Iterator[str]:
        if not self.paths:
            yield f'data.source = "{data.source}" needs data.paths, the files to read'
        yield from super().problems(data, vocab_size)

    def files(self) -> list[Path]:
        """The files to read."""
        return find_files(self.paths, self.suffixes)

    def size(self) -> int:
        """Total bytes."""
        return sum(path.stat().st_size for path in self.files())


def id_problems(data: DataSpec, *names: str) -> Iterator[str]:
    """Rejects these fields, eos and bos, given as strings if there is no tokenizer."""
    for name in names:
        if isinstance(value := getattr(data, name), str):
            yield (
                f'data.{name} = "{value}" must be an id: data.source = "{data.source}" has no '
                "tokenizer"
            )
