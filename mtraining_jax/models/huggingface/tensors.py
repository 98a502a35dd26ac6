"""The safetensors of a checkpoint or of adapters. Does not import JAX."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from mtraining_jax.models.huggingface.config import read_json
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.file_limits import LARGEST_INDEX, absence, is_plain_name

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PEFT_FILE = "adapter_model.safetensors"


class Tensors:
    """The tensors of a checkpoint, read lazily, and their files by name."""

    def __init__(self, directory: str | Path, single_file: str = SINGLE_FILE) -> None:
        self.directory = Path(directory)
        single, index = self.directory / single_file, self.directory / INDEX_FILE
        self.metadata: dict[str, str] = {}
        if single.exists() or single_file != SINGLE_FILE:
            self._handles = {single: _open_file(single)}
            self.metadata = self._handles[single].metadata() or {}
            self.files = dict.fromkeys(self._handles[single].keys(), single)
            return
        if not index.exists():
            raise UserError(f"{self.directory} has neither {SINGLE_FILE} nor {INDEX_FILE}")
        weight_map = read_json(index, LARGEST_INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UserError(f'{index} has no "weight_map"')
        for name, file in weight_map.items():
            if not isinstance(file, str) or not is_plain_name(file):
                raise UserError(f"{index}: the file of {name} is {file!r}, not a plain file name")
        self.files = {name: self.directory / file for name, file in weight_map.items()}
        self._handles = {path: _open_file(path) for path in sorted(set(self.files.values()))}
        inside = {path: set(handle.keys()) for path, handle in self._handles.items()}
        for name, path in self.files.items():
            if name not in inside[path]:
                raise UserError(f"{path} lacks tensor {name}, but {INDEX_FILE} lists it there")
        for path, names in inside.items():
            if others := sorted(name for name in names if self.files.get(name) != path):
                raise UserError(f"{path} has tensor {others[0]}, which {INDEX_FILE} does not list")

    def open(self, name: str) -> Any:
        return self._handles[self.files[name]].get_slice(name)


def _open_file(path: Path) -> Any:
    if (problem := absence(path)) is not None:  # opening a pipe would wait for its writer
        listed = "" if path.name in (SINGLE_FILE, PEFT_FILE) else f", but {INDEX_FILE} lists it"
        raise UserError(f"{path} {problem}{listed}")
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise UserError(f"{path} is truncated or not a safetensors file: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error}") from None
