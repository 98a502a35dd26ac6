"""Hugging Face datasets saved to disk (Arrow files), one document per row."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtraining_jax.data.documents import DocumentSource
from mtraining_jax.data.files import find_folders, first_line, inside, shown_names
from mtraining_jax.data.source import FileSource
from mtraining_jax.data.sources.arrow_columns import Column, load_pyarrow
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.field_types import Text
from mtraining_jax.utils.file_limits import read_json

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_FILE_MAGIC = b"ARROW1"  # Arrow file format, as opposed to the stream format
_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


@dataclass(frozen=True, kw_only=True)
class HuggingFaceOnDisk(FileSource, DocumentSource):
    """Folders written by `Dataset.save_to_disk` (needs the extra parquet).

    Attributes:
        text_field: JSONL field or table column with the text.
        token_field: Table column with token ids, used instead of text_field.
    """

    text_field: Text = "text"
    token_field: Text | None = None

    @property
    def holds_ids(self) -> bool:
        return self.token_field is not None

    def files(self) -> list[Path]:
        """The Arrow files of all data sets, in the order of their rows."""
        return [file for folder in find_folders(self.paths) for file in _data_files(folder)]

    def documents(self) -> Iterator[tuple[str, str | np.ndarray]]:
        column = Column(self.token_field or self.text_field, self.holds_ids, "hf_disk")
        pyarrow = load_pyarrow("hf_disk")
        for path in self.files():
            try:
                source = pyarrow.memory_map(str(path))
                stream = source.read_at(len(_FILE_MAGIC), 0) != _FILE_MAGIC
                opened = pyarrow.ipc.open_stream if stream else pyarrow.ipc.open_file
                schema = opened(source).schema
                names = schema.names  # decoded here, may raise UnicodeDecodeError
            except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
                raise UserError(
                    f"data.paths: {path} is not a valid Arrow file ({first_line(error)})"
                ) from error
            column.check(schema, path)
            # Skips other columns, which may have any type.
            wanted = pyarrow.ipc.IpcReadOptions(included_fields=[names.index(column.name)])
            read = functools.partial(opened, options=wanted)
            batches = _of_stream if stream else _of_file
            yield from column.documents(functools.partial(batches, read, source), path)


def _data_files(folder: Path) -> list[Path]:
    """The files listed in state.json; the folder may also have cache files."""
    path = folder / _STATE
    if not path.is_file():
        if (folder / _SPLITS).is_file():
            splits = shown_names(p.parent.name for p in sorted(folder.glob(f"*/{_STATE}")))
            raise UserError(
                f"data.paths: {folder} has several splits, {splits}; use the folder of one split"
            )
        raise UserError(f"data.paths: {folder} was not written by save_to_disk: it has no {_STATE}")
    try:
        state = read_json(path)
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({first_line(error)})") from error
    if state.get("_indices_data_files"):
        raise UserError(
            f"{path}: this data set selects its rows with indices, which are not supported; call "
            "flatten_indices() and save it again"
        )
    if not names:
        raise UserError(f"{path} lists no files")
    files = [inside(folder, name, path) for name in names]
    for file in files:
        if not file.is_file():
            raise UserError(f"{path} lists {file.name}, which does not exist")
    return files


def _of_file(opened: Callable[[Any], Any], source: Any) -> Iterator[Any]:
    file = opened(source)
    for number in range(file.num_record_batches):
        yield _checked(file.get_batch(number))


def _of_stream(opened: Callable[[Any], Any], source: Any) -> Iterator[Any]:
    source.seek(0)
    for batch in opened(source):
        yield _checked(batch)
    # A stream truncated between two batches lacks only its end marker.
    size = source.size()
    if source.tell() != size or source.read_at(len(_STREAM_END), size - len(_STREAM_END)) != (
        _STREAM_END
    ):
        raise OSError("it is truncated")


def _checked(batch: Any) -> Any:
    # Invalid offsets in a corrupt file would read out of bounds.
    batch.validate(full=True)
    return batch
