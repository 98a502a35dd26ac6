"""MosaicML streaming (MDS) shards, read without the streaming library."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mtraining_jax.data.documents import Document, TableSource
from mtraining_jax.data.files import find_files
from mtraining_jax.tools.corpus.mds_format import (
    INDEX,
    Damaged,
    Shard,
    decoded,
    read_index,
    samples,
)
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.limits import Text


@options(kw_only=True)
class MosaicShards(TableSource):
    """Folders with an index.json and its shards; a sample has one or several documents."""

    span_field: Text = "indices"
    """MDS column with the documents of a sample, as pairs of begin and end in tokens; without it a
    sample is one document."""

    def files(self) -> list[Path]:
        """The outermost index.json files."""
        found = [path for path in find_files(self.paths, (INDEX,)) if path.name == INDEX]
        if not found:
            raise UserError(f"data.paths: {', '.join(self.paths)} must be {INDEX} or a folder")
        folders = {path.parent for path in found}
        return [path for path in found if not folders.intersection(path.parent.parents)]

    def inputs(self) -> list[Path]:
        """The indices, and the shards that they list."""
        indices = self.files()
        return [*indices, *(shard.file for index in indices for shard in read_index(index))]

    def size(self) -> int:
        """Uncompressed size in bytes."""
        return sum(shard.size for index in self.files() for shard in read_index(index))

    def documents(self) -> Iterator[tuple[str, Document]]:
        for index in self.files():
            for shard in read_index(index):
                yield from self._of_shard(shard)

    def _of_shard(self, shard: Shard) -> Iterator[tuple[str, Document]]:
        of = self.columns_in(shard.names, str(shard.path))
        columns = [shard.column(name, self.shown(option)) for option, name in of.items()]
        if self.holds_ids and self.span_field in shard.names:
            columns.append(shard.column(self.span_field, "data.span_field"))
        encodings = [shard.encodings[number] for number in columns]
        for name, encoding in zip(self.columns.values(), encodings, strict=False):
            if not self.holds_ids and encoding != "str":
                raise UserError(
                    f'{shard.path}: column "{name}" is {encoding}, not text; '
                    "use data.token_field for token ids"
                )
        where = f"data.paths: {shard.file}"
        try:
            for number, parts in enumerate(samples(shard, columns)):
                where = f"{shard.path}, sample {number}"
                yield from self._of_sample(parts, encodings, where)
                where = f"{shard.path}, sample {number + 1}"
        except Damaged as error:
            raise UserError(f"{where} {error}") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{where} is not UTF-8 text (byte {error.start})") from error

    def _of_sample(
        self, parts: list[np.ndarray], encodings: list[str], where: str
    ) -> Iterator[tuple[str, Document]]:
        if not self.holds_ids:
            yield where, self.document([part.tobytes().decode("utf-8") for part in parts], where)
            return
        values = [decoded(*of) for of in zip(parts, encodings, strict=True)]
        ids, of_tokens = values[0], values[: len(self.columns)]
        if ids.dtype.kind not in "iu" or ids.ndim != 1:
            raise Damaged(f"has {ids.dtype} of shape {ids.shape}, not a list of token ids")
        sample = self.document(of_tokens, where)  # checks the mask
        if len(values) == len(of_tokens):
            yield where, sample
            return
        for number, span in enumerate(_spans(values[-1], ids.size)):
            part = self.document([x[slice(*span)] for x in of_tokens], where)
            yield f"{where}, document {number}", part


def _spans(spans: np.ndarray, size: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each document of a sample of `size` tokens."""
    if spans.dtype.kind not in "iu" or spans.ndim != 2 or spans.shape[1] != 2:
        raise Damaged(f"has spans of {spans.dtype} {spans.shape}, not pairs of integers")
    for number, (begin, end) in enumerate(spans.tolist()):
        if not 0 <= begin <= end <= size:
            raise Damaged(f"has {size} tokens, but its document {number} has span {begin} to {end}")
        yield begin, end
