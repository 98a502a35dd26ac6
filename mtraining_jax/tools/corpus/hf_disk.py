"""Hugging Face datasets saved to disk (Arrow files), one document per row."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from mtraining_jax.data.files import errors_as, find_folders, inside, shown_names
from mtraining_jax.tools.corpus.arrow import ArrowSource
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.file_limits import read_json

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_FILE_MAGIC = b"ARROW1"  # Arrow file format, as opposed to the stream format
_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


@options(kw_only=True)
class HuggingFaceOnDisk(ArrowSource):
    """Folders written by `Dataset.save_to_disk` (needs the extra parquet)."""

    name: ClassVar[str] = "hf_disk"
    file_format: ClassVar[str] = "Arrow"

    def files(self) -> list[Path]:
        """The Arrow files of all data sets, in the order of their rows."""
        return [file for folder in find_folders(self.paths) for file in _data_files(folder)]

    def open_table(self, path: Path) -> tuple[Any, Callable[[list[str]], Iterable[Any]]]:
        import pyarrow

        source = pyarrow.memory_map(str(path))
        is_stream = source.read_at(len(_FILE_MAGIC), 0) != _FILE_MAGIC
        opened = pyarrow.ipc.open_stream if is_stream else pyarrow.ipc.open_file
        schema = opened(source).schema

        def batches(columns: list[str]) -> Iterator[Any]:
            source.seek(0)
            # Skips other columns, which may have any type.
            fields = [schema.names.index(column) for column in columns]
            options = pyarrow.ipc.IpcReadOptions(included_fields=fields)
            reader = opened(source, options=options)
            found = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
            for batch in found:
                # Invalid offsets in a corrupt file would read out of bounds.
                batch.validate(full=True)
                yield batch
            # A stream truncated between two batches lacks only its end marker.
            end = source.read_at(len(_STREAM_END), source.size() - len(_STREAM_END))
            if is_stream and (source.tell() != source.size() or end != _STREAM_END):
                raise OSError("it is truncated")

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
    with errors_as(UserError, f"{path} cannot be read", OSError, ValueError, KeyError, TypeError):
        state = read_json(path)
        names = [str(entry["filename"]) for entry in state["_data_files"]]
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
