"""Reads safetensors into a sharded state; each device reads only its slices."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import SingleDeviceSharding

from mtraining_jax.models.huggingface.checksums import digest_like
from mtraining_jax.models.huggingface.config import CONFIG_FILE, check_same_model
from mtraining_jax.models.huggingface.names import CheckpointTensor, Part, checkpoint_tensors
from mtraining_jax.models.huggingface.peft import BASE_DIGEST, MERGE, adapter_tensors, is_shared
from mtraining_jax.models.huggingface.tensors import PEFT_FILE, Tensors
from mtraining_jax.models.rope.rotary import rope_frequencies
from mtraining_jax.models.sharding import named_shapes, parameter_names
from mtraining_jax.models.spec import ModelSpec
from mtraining_jax.models.transformer import abstract_state
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.hub import local_folder

_DTYPES = ("F32", "BF16", "F16")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_ROWS = 4096  # of a matrix in memory at a time
# Tolerances of frequencies by the dtype of their tensor: relative, and absolute.
_ROUNDING = {"F32": (1e-5, 0.0), "BF16": (1e-2, 0.0), "F16": (1e-3, 1e-7)}

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
    spec, directory = ModelSpec.from_config(config), local_folder(directory, weights=True)
    theirs, tensors = check_same_model(spec, directory, override), Tensors(directory)
    copies = _copies(tensors, spec)
    sources = _check_tensors(tensors, [*checkpoint_tensors(spec), *copies])
    for copy in copies:
        _check_copy(tensors, copy.name, theirs)
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
    directory = local_folder(directory, weights=True)
    tensors = Tensors(directory, PEFT_FILE)
    expected = adapter_tensors(spec, is_shared(directory, spec))
    sources = _check_tensors(tensors, expected)
    for tensor in expected:
        _check_diagonal(tensors, tensor)
    check_base(directory, tensors.metadata.get(BASE_DIGEST), base)
    return {name: _load_parameter(sources[name], x) for name, x in wanted.items()}


def check_base(path: str | Path, needed: str | None, base: Mapping[str, Array]) -> None:
    """Raises a UserError if adapters with the digest of a base do not belong to `base`."""
    if needed is None or needed == (found := digest_like(base, needed)):
        return
    if needed.rpartition("-")[0] != found.rpartition("-")[0]:
        raise UserError(
            f"{path} identifies its base model by the digest {needed} of another version of "
            f"mtraining-jax, which cannot be compared with {found} of model.init_from; load it "
            "with the version that wrote it, or write it again with this one"
        )
    raise UserError(
        f"{path} has adapters of another base model: it needs the one with digest {needed}, "
        f"but model.init_from has {found}; set model.init_from to the folder that the adapters "
        "were trained from"
    )


def _copies(tensors: Tensors, spec: ModelSpec) -> list[CheckpointTensor]:
    """Tensors without a parameter, because they repeat a tied embedding or config.json."""
    found = [
        CheckpointTensor(name, (spec.head_dim // 2,), [])
        for name in tensors.files
        if name.endswith("rotary_emb.inv_freq")
    ]
    if spec.tie_word_embeddings and _HEAD in tensors.files:
        found.append(CheckpointTensor(_HEAD, (spec.vocab_size, spec.hidden_size), []))
    return found


def _check_copy(tensors: Tensors, name: str, spec: ModelSpec) -> None:
    """Raises a UserError if one of `_copies` repeats something else."""
    where, found = f"{tensors.files[name]}: tensor {name}", tensors.open(name)
    if name == _HEAD:
        # In transformers, tensors that differ are not tied.
        embedding = tensors.open(_EMBEDDING)
        for start in range(0, spec.vocab_size, _ROWS):
            rows = slice(start, min(start + _ROWS, spec.vocab_size))
            if not np.array_equal(*(x[rows].astype(np.float32) for x in (found, embedding))):
                raise UserError(
                    f"{where} differs from {_EMBEDDING}, although {CONFIG_FILE} has "
                    "tie_word_embeddings = true; set it to false there"
                )
        return
    # Older files have the frequencies before scaling.
    frequencies = (rope_frequencies(x, 1)[0] for x in (spec, replace(spec, rope_scaling=None)))
    relative, absolute = _ROUNDING[found.get_dtype()]
    if not any(
        np.allclose(found[:].astype(np.float64), x, rtol=relative, atol=absolute)
        for x in frequencies
    ):
        raise UserError(
            f"{where} has frequencies of another RoPE than {CONFIG_FILE}, where rope_theta = "
            f"{spec.rope_theta}; correct it there, or remove the tensor, which transformers ignores"
        )


def _check_tensors(
    tensors: Tensors, expected: Sequence[CheckpointTensor]
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
    names = {tensor.name for tensor in expected}
    for name, path in tensors.files.items():
        if name not in names:
            raise UserError(f"{path}: tensor {name} does not belong to this model")
    return sources


def _check_diagonal(tensors: Tensors, tensor: CheckpointTensor) -> None:
    """Raises a UserError if a B of several adapters has numbers outside of their blocks."""
    starts = [(part.first_row, part.first_column) for part in tensor.parts]
    if not any(column for _, column in starts):
        return
    rest = tensors.open(tensor.name)[:].copy()
    for (row, column), (end, next_column) in zip(starts, [*starts[1:], tensor.shape], strict=True):
        rest[row:end, column:next_column] = 0
    if np.any(rest):
        raise UserError(
            f"{tensors.files[tensor.name]}: tensor {tensor.name} is not block-diagonal, as after "
            f"more training with PEFT, where its {len(starts)} projections share a module; {MERGE}"
        )


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
