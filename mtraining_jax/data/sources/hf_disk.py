"""Data sets that Hugging Face's `datasets` has saved to disk: Arrow files. One document a row."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtraining_jax.bounded import read_json
from mtraining_jax.data.arrow_columns import Column, load_pyarrow
from mtraining_jax.data.documents import DocumentSource
from mtraining_jax.data.files import find_folders, first_line, inside, shown_names
from mtraining_jax.data.source import FileSource
from mtraining_jax.errors import UserError
from mtraining_jax.field_types import Text

_STATE, _SPLITS = "state.json", "dataset_dict.json"
# What another format than a stream of batches begins with.
_FILE_MAGIC = b"ARROW1"
_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


@dataclass(frozen=True, kw_only=True)
class HuggingFaceOnDisk(FileSource, DocumentSource):
    """Folders that `Dataset.save_to_disk` wrote (needs the extra parquet).

    Attributes:
        text_field: Field of a JSONL line, or column of a table, that holds the text.
        token_field: Column of a table that holds token ids, read instead of text_field.
    """

    text_field: Text = "text"
    token_field: Text | None = None

    @property
    def holds_ids(self) -> bool:
        """As of `DocumentSource`."""
        return self.token_field is not None

    def files(self) -> list[Path]:
        """The Arrow files of the data sets that `paths` names, in the order of their rows."""
        return [file for folder in find_folders(self.paths) for file in _data_files(folder)]

    def documents(self) -> Iterator[tuple[str, str | np.ndarray]]:
        """As of `DocumentSource`."""
        column = Column(self.token_field or self.text_field, self.holds_ids, "hf_disk")
        pyarrow = load_pyarrow("hf_disk")
        for path in self.files():
            try:
                source = pyarrow.memory_map(str(path))
                stream = source.read_at(len(_FILE_MAGIC), 0) != _FILE_MAGIC
                opened = pyarrow.ipc.open_stream if stream else pyarrow.ipc.open_file
                schema = opened(source).schema
                names = schema.names  # which are decoded only here
            except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
                raise UserError(
                    f"data.paths: {path} is not a whole Arrow file ({first_line(error)})"
                ) from error
            column.check(schema, path)
            # Other columns are neither unpacked nor checked: they may be anything.
            wanted = pyarrow.ipc.IpcReadOptions(included_fields=[names.index(column.name)])
            read = functools.partial(opened, options=wanted)
            batches = _of_stream if stream else _of_file
            yield from column.documents(functools.partial(batches, read, source), path)


def _data_files(folder: Path) -> list[Path]:
    """What state.json says, as other Arrow files lie there too: those of a cache."""
    path = folder / _STATE
    if not path.is_file():
        if (folder / _SPLITS).is_file():
            splits = shown_names(p.parent.name for p in sorted(folder.glob(f"*/{_STATE}")))
            raise UserError(
                f"data.paths: {folder} holds several splits: {splits}; name the folder of one"
            )
        raise UserError(
            f"data.paths: {folder} is no data set that save_to_disk wrote: it has no {_STATE}"
        )
    try:
        state = read_json(path)
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({first_line(error)})") from error
    if state.get("_indices_data_files"):
        raise UserError(
            f"{path}: the rows of this data set are chosen by a list of indices, which is not read "
            "here; save it anew after flatten_indices()"
        )
    if not names:
        raise UserError(f"{path} names no file")
    files = [inside(folder, name, path) for name in names]
    for file in files:
        if not file.is_file():
            raise UserError(f"{path} names {file.name}, which is not there")
    return files


def _of_file(opened: Callable[[Any], Any], source: Any) -> Iterator[Any]:
    file = opened(source)
    for number in range(file.num_record_batches):
        yield _checked(file.get_batch(number))


def _of_stream(opened: Callable[[Any], Any], source: Any) -> Iterator[Any]:
    source.seek(0)
    for batch in opened(source):
        yield _checked(batch)
    # A stream that was cut between two batches reads like a whole one, but for its end.
    size = source.size()
    if source.tell() != size or source.read_at(len(_STREAM_END), size - len(_STREAM_END)) != (
        _STREAM_END
    ):
        raise OSError("it ends before its end")


def _checked(batch: Any) -> Any:
    # Offsets of a damaged file would lead out of its memory.
    batch.validate(full=True)
    return batch
