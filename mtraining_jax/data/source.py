"""The interface of a data source: its options, the mistakes it can detect, and its tokens.

A source is one file under `sources/`, registered there, or a class of the user's own, named as
`--data.source=package.module:Name`. A configuration imports all sources, so their files import
nothing slow at the top (no JAX, no pyarrow, no tokenizer library).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from mtraining_jax.data.files import find_files
from mtraining_jax.field_types import TextList

if TYPE_CHECKING:
    from mtraining_jax.config import DataConfig
    from mtraining_jax.data.corpus import Corpus


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where tokens come from: a frozen dataclass, whose fields are options of `[data]`.

    Types of fields may carry limits (`mtraining_jax.field_types`); "Attributes:" of the docstring
    is their help text. Options that all sources share (`seq_len`, `mode`, `eos`, ...) are fields
    of the section, which every method is given.

    Attributes:
        modes: values of `data.mode` that it supports.
    """

    modes: ClassVar[tuple[str, ...]] = ("concat", "exact")

    def problems(self, data: "DataConfig", vocab_size: int) -> Iterator[str]:
        """One sentence for each mistake that can be detected before anything is opened.

        Args:
            data: the section.
            vocab_size: ids that the model knows.
        """
        yield from ()

    def has_lengths(self, data: "DataConfig") -> bool:
        """Whether `open` finds the lengths of documents without reading or tokenising them.

        Plans then open the source.
        """
        return False

    def open(self, data: "DataConfig", vocab_size: int) -> "Corpus":
        """Finds the tokens and cuts them into sequences; called once, after `problems`.

        Every process of a run opens the source, and all must find the same.

        Args:
            data: the section.
            vocab_size: ids that the model knows; all tokens must be below it.

        Raises:
            UserError: the source is unreadable, malformed or too small, or does not fit the
                vocabulary.
        """
        raise NotImplementedError(f"{type(self).__name__}.open")


@dataclass(frozen=True, kw_only=True)
class FileSource(Source):
    """A source that reads files.

    Attributes:
        paths: Files, folders or glob patterns to read.
        suffixes: of the files that a folder is searched for; empty takes all that are not hidden.
    """

    paths: TextList = ()
    suffixes: ClassVar[tuple[str, ...]] = ()

    def problems(self, data: "DataConfig", vocab_size: int) -> Iterator[str]:
        """As of `Source`."""
        if not self.paths:
            yield f'data.source = "{data.source}" needs data.paths, the files to read'
        yield from super().problems(data, vocab_size)

    def files(self) -> list[Path]:
        """The files that `paths` means, in an order that every process agrees on.

        Raises:
            UserError: a path that is missing or finds nothing, or an empty file.
        """
        return find_files(self.paths, self.suffixes)

    def size(self) -> int:
        """Bytes on disk of what it reads."""
        return sum(path.stat().st_size for path in self.files())
