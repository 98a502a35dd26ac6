"""Reads safetensors into a sharded state; each device reads only its slices."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Sharding, SingleDeviceSharding
from safetensors import SafetensorError, safe_open

from mtraining_jax.models.huggingface.config import check_same_model, read_json
from mtraining_jax.models.huggingface.names import Part, checkpoint_tensors
from mtraining_jax.models.sharding import parameter_names
from mtraining_jax.models.spec import ModelSpec
from mtraining_jax.models.transformer import abstract_state
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.file_limits import LARGEST_INDEX, absence, is_plain_name

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = ("F32", "BF16", "F16")

_Source = tuple[Any, Part]  # a tensor, and its rows that belong to a parameter


def load_hf(
    directory: str | Path,
    config: Any,
    shardings: nnx.State | None = None,
    *,
    override: Sequence[str] = (),
) -> nnx.State:
    """Reads a checkpoint into the stacked fp32 state of a `Transformer`.

    Everything is checked before any tensor is read. Each process reads only its devices' slices.

    Args:
        directory: folder of config.json and safetensors (F32, BF16 or F16), in shards or not.
        config: the model: a `ModelSpec`, or any object or mapping with its fields.
        shardings: from `param_shardings`; None is the default device.
        override: fields of `config.FREE` in which `config` may differ from config.json.

    Raises:
        UserError: a file is missing or damaged, or the checkpoint is of another model.
    """
    spec = ModelSpec.from_config(config)
    check_same_model(spec, directory, override)
    wanted = abstract_state(spec)
    if shardings is None:
        device = SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: device, wanted)
    sources = _check_tensors(Tensors(directory), spec)

    def load(name: str, leaf: jax.ShapeDtypeStruct, sharding: Sharding) -> Array:
        return _load_parameter(sources[name], leaf.shape, sharding)

    return jax.tree.map(load, parameter_names(wanted), wanted, shardings)


class Tensors:
    """The tensors of a checkpoint, read lazily, and their files by name."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        single, index = self.directory / SINGLE_FILE, self.directory / INDEX_FILE
        if single.exists():
            self._handles = {single: _open_file(single)}
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

    def open(self, name: str) -> Any:
        return self._handles[self.files[name]].get_slice(name)


def _open_file(path: Path) -> Any:
    if (problem := absence(path)) is not None:  # opening a pipe would wait for its writer
        listed = "" if path.name == SINGLE_FILE else f", but {INDEX_FILE} lists it"
        raise UserError(f"{path} {problem}{listed}")
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise UserError(f"{path} is truncated or not a safetensors file: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error}") from None


def _check_tensors(tensors: Tensors, spec: ModelSpec) -> dict[str, list[_Source]]:
    """The sources of every parameter, in layer order for stacked ones."""
    expected = checkpoint_tensors(spec)
    sources: dict[str, list[_Source]] = {}
    for tensor in expected:
        name = tensor.name
        if name not in tensors.files:
            raise UserError(f"{tensors.directory} has no tensor {name}")
        found = tensors.open(name)
        shape, dtype, where = found.get_shape(), found.get_dtype(), f"{tensors.files[name]}: tensor"
        if tuple(shape) != tensor.shape:
            needed = list(tensor.shape)
            raise UserError(f"{where} {name} has shape {shape}, but the model needs {needed}")
        if dtype not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise UserError(f"{where} {name} has dtype {dtype}; it must be one of {known}")
        for part in tensor.parts:
            sources.setdefault(part.parameter, []).append((found, part))
    # The copy of a tied embedding and rotary tables are ignored.
    names = {tensor.name for tensor in expected}
    names |= {"lm_head.weight"} if spec.tie_word_embeddings else set()
    for name, path in tensors.files.items():
        if name not in names and not name.endswith("rotary_emb.inv_freq"):
            raise UserError(f"{path}: tensor {name} does not belong to this model")
    return sources


def _load_parameter(
    sources: Sequence[_Source], shape: tuple[int, ...], sharding: Sharding
) -> Array:
    @functools.cache  # devices with the same slice share one read
    def block(ranges: tuple[tuple[int, int, int], ...]) -> np.ndarray:
        slices = [slice(start, stop) for start, stop, _ in ranges]
        if sources[0][1].layer is None:
            return _read_rows(sources[0], *slices).astype(np.float32)
        layers, *rest = slices
        values = np.empty([stop - start for start, stop, _ in ranges], np.float32)
        for row, layer in enumerate(range(layers.start, layers.stop)):
            values[row] = _read_rows(sources[layer], *rest)
        return values

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        return block(tuple(part.indices(size) for part, size in zip(index, shape, strict=True)))

    return jax.make_array_from_callback(shape, sharding, read)


def _read_rows(source: _Source, rows: slice, *rest: slice) -> np.ndarray:
    tensor, part = source
    return tensor[(slice(rows.start + part.first_row, rows.stop + part.first_row), *rest)]
