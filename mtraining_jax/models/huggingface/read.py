"""Reads safetensors into a sharded state; each device reads only its slices."""

import functools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import SingleDeviceSharding
from safetensors import SafetensorError, safe_open

from mtraining_jax.models.huggingface.checksums import digest
from mtraining_jax.models.huggingface.config import check_same_model, read_json
from mtraining_jax.models.huggingface.names import CheckpointTensor, Part, checkpoint_tensors
from mtraining_jax.models.huggingface.peft import BASE_DIGEST, PEFT_FILE, adapter_tensors, is_shared
from mtraining_jax.models.sharding import named_shapes, parameter_names
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
    wanted = abstract_state(config)
    if shardings is None:
        device = SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: device, wanted)
    shapes = named_shapes(wanted, shardings)
    loaded = load_parameters(directory, config, shapes, override=override)
    return jax.tree.map(lambda name: loaded[name], parameter_names(wanted))


def load_parameters(
    directory: str | Path,
    config: Any,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    *,
    override: Sequence[str] = (),
) -> dict[str, Array]:
    """Reads the parameters of a checkpoint by name; for the other arguments see `load_hf`.

    `wanted` has shape, dtype and sharding of each parameter of the model, except for adapters.
    """
    spec = ModelSpec.from_config(config)
    check_same_model(spec, directory, override)
    # The copy of a tied embedding and rotary tables are ignored.
    ignored = {"lm_head.weight"} if spec.tie_word_embeddings else set()
    sources = _check_tensors(Tensors(directory), checkpoint_tensors(spec), ignored)
    return {name: _load_parameter(sources[name], x) for name, x in wanted.items()}


def load_peft(
    directory: str | Path,
    spec: ModelSpec,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    base: Mapping[str, Array],
) -> dict[str, Array]:
    """Reads PEFT adapters for the adapters of `spec`, by name.

    Raises:
        UserError: a file is missing or damaged, or the adapters have other shapes or another base.
    """
    tensors = Tensors(directory, PEFT_FILE)
    sources = _check_tensors(tensors, adapter_tensors(spec, is_shared(directory, spec)))
    check_base(directory, tensors.metadata.get(BASE_DIGEST), base)
    return {name: _load_parameter(sources[name], x) for name, x in wanted.items()}


def check_base(path: str | Path, needed: str | None, base: Mapping[str, Array]) -> None:
    """Raises a UserError if adapters with the digest of a base do not belong to `base`."""
    if needed is not None and needed != (found := digest(base)):
        raise UserError(
            f"{path} has adapters of another base model: it needs the one with digest {needed}, "
            f"but model.init_from has {found}; set model.init_from to the folder that the adapters "
            "were trained from"
        )


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


def _check_tensors(
    tensors: Tensors, expected: Sequence[CheckpointTensor], ignored: Collection[str] = ()
) -> dict[str, list[_Source]]:
    """The sources of every parameter, in layer order for stacked ones."""
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
    names = {*(tensor.name for tensor in expected), *ignored}
    for name, path in tensors.files.items():
        if name not in names and not name.endswith("rotary_emb.inv_freq"):
            raise UserError(f"{path}: tensor {name} does not belong to this model")
    return sources


def _load_parameter(sources: Sequence[_Source], wanted: jax.ShapeDtypeStruct) -> Array:
    dtype = wanted.dtype

    @functools.cache  # devices with the same slice share one read
    def block(ranges: tuple[tuple[int, int, int], ...]) -> np.ndarray:
        slices = [slice(start, stop) for start, stop, _ in ranges]
        number_of = {part.index: number for number, (_, part) in enumerate(sources)}
        leading = len(sources[0][1].index)
        values = np.empty([stop - start for start, stop, _ in ranges], dtype)
        for place in np.ndindex(values.shape[:leading]):
            index = tuple(x.start + i for x, i in zip(slices, place, strict=False))
            values[place] = _read_part(sources[number_of[index]], *slices[leading:])
        return values

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        sizes = zip(index, wanted.shape, strict=True)
        return block(tuple(part.indices(size) for part, size in sizes))

    return jax.make_array_from_callback(wanted.shape, wanted.sharding, read)


def _read_part(source: _Source, *slices: slice) -> np.ndarray:
    tensor, part = source
    if step := part.alternating:
        experts, rows, *columns = slices
        wide = slice(rows.start * step, rows.stop * step)
        return tensor[(experts, *columns, wide)][..., part.first_column :: step].swapaxes(1, -1)
    starts = zip(slices, (part.first_row, part.first_column), strict=False)
    return tensor[tuple(slice(x.start + first, x.stop + first) for x, first in starts)]
