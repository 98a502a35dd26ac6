"""Hugging Face datasets saved to disk (Arrow files), one document per row."""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mtraining_jax.data.files import find_folders, first_line, inside, shown_names
from mtraining_jax.data.sources.arrow import ArrowSource
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.file_limits import read_json

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_FILE_MAGIC = b"ARROW1"  # Arrow file format, as opposed to the stream format
_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


@dataclass(frozen=True, kw_only=True)
class HuggingFaceOnDisk(ArrowSource):
    """Folders written by `Dataset.save_to_disk` (needs the extra parquet)."""

    name: ClassVar[str] = "hf_disk"
    file_format: ClassVar[str] = "Arrow"

    def files(self) -> list[Path]:
        """The Arrow files of all data sets, in the order of their rows."""
        return [file for folder in find_folders(self.paths) for file in _data_files(folder)]

    def open_table(self, path: Path, pyarrow: Any) -> tuple[Any, Callable[[str], Iterable[Any]]]:
        source = pyarrow.memory_map(str(path))
        is_stream = source.read_at(len(_FILE_MAGIC), 0) != _FILE_MAGIC
        opened = pyarrow.ipc.open_stream if is_stream else pyarrow.ipc.open_file
        schema = opened(source).schema

        def batches(column: str) -> Iterator[Any]:
            # Skips other columns, which may have any type.
            wanted = pyarrow.ipc.IpcReadOptions(included_fields=[schema.names.index(column)])
            read = functools.partial(opened, options=wanted)
            for batch in (_of_stream if is_stream else _of_file)(read, source):
                # Invalid offsets in a corrupt file would read out of bounds.
                batch.validate(full=True)
                yield batch

        return schema, batches


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
    return map(file.get_batch, range(file.num_record_batches))


def _of_stream(opened: Callable[[Any], Any], source: Any) -> Iterator[Any]:
    source.seek(0)
    yield from opened(source)
    # A stream truncated between two batches lacks only its end marker.
    size, end = source.size(), len(_STREAM_END)
    if source.tell() != size or source.read_at(end, size - end) != _STREAM_END:
        raise OSError("it is truncated")
