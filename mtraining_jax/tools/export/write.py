"""Writes a state as a Hugging Face checkpoint, which appears only when complete."""

import functools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from safetensors import SafetensorError
from safetensors.numpy import save_file

from mtraining_jax.models.huggingface.checksums import digest
from mtraining_jax.models.huggingface.config import CONFIG_FILE, SPARSE_ENTRY, hf_config, read_json
from mtraining_jax.models.huggingface.names import CheckpointTensor, Part, checkpoint_tensors
from mtraining_jax.models.huggingface.peft import (
    BASE_DIGEST,
    PEFT_CONFIG,
    adapter_tensors,
    peft_config,
)
from mtraining_jax.models.huggingface.tensors import INDEX_FILE, PEFT_FILE, SINGLE_FILE
from mtraining_jax.models.lora.adapters import FACTORS, LoraSpec
from mtraining_jax.models.products import dot32
from mtraining_jax.models.sharding import parameter_names
from mtraining_jax.models.spec import ComputeDtype, ModelSpec
from mtraining_jax.parallel.host_memory import to_device
from mtraining_jax.utils.errors import UserError

_SPARSE_FILE = Path(__file__).with_name("sparse_attention.py")
# Fields of the folder `like` that do not describe what is written: its path, its own code, lengths
# that transformers prefers to those of RoPE, and the pattern of another run.
_STALE = "_name_or_path", "auto_map", "original_max_position_embeddings", SPARSE_ENTRY
# If these are missing, transformers assumes ids that the vocabulary may not have.
_UNKNOWN_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def save_hf(
    directory: str | Path,
    config: Any,
    state: Any,
    *,
    dtype: str = "bfloat16",
    max_shard_bytes: int = 5_000_000_000,
    copied: Mapping[str, Path | dict[str, Any]] | None = None,
    replace: bool = False,
    like: str | Path | None = None,
    eos: Sequence[int] = (),
    sparsity: Mapping[str, Any] | None = None,
) -> Path:
    """Writes config.json and safetensors for transformers.

    All processes must call this. A host holds at most the tensors of one file. The folder appears
    under its name when everything is on disk.

    Args:
        directory: target folder; must not exist, or be empty.
        config: a `ModelSpec`, or any object or mapping with its fields. With adapters, the merged
            model is written.
        state: state of a `Transformer` (`nnx.State` or pure dict), arrays with any sharding.
        dtype: dtype of the written tensors, "bfloat16" or "float32".
        max_shard_bytes: maximum size of a file; a larger tensor gets its own file.
        copied: extra files by name: a file to copy, or the contents of a JSON file.
        replace: replace an older folder, which is deleted when the new one is complete.
        like: folder with a config.json that provides fields that are not in `ModelSpec`.
        eos: ids of the end tokens; none: those of `like`.
        sparsity: result of `sparse_entry`; if given, transformers can use the pattern with a file
            that is added.

    Raises:
        UserError: the folder is in use or not writable, or an argument is invalid; nothing is left.
    """
    spec, directory = ModelSpec.from_config(config), Path(directory)
    if dtype not in get_args(ComputeDtype):
        raise UserError(f'dtype="{dtype}" must be one of {", ".join(get_args(ComputeDtype))}')
    if max_shard_bytes < 1:
        raise UserError(f"max_shard_bytes={max_shard_bytes} must be positive")

    config_json = config_like(spec, dtype, like, eos)
    if sparsity is not None:
        config_json[SPARSE_ENTRY] = dict(sparsity)
        copied = {**(copied or {}), _SPARSE_FILE.name: _SPARSE_FILE}
    names, leaves = jax.tree.leaves(parameter_names(state)), jax.tree.leaves(state)
    parameters = dict(zip(names, leaves, strict=True))
    found = {name: parameter.shape for name, parameter in parameters.items()}
    needed = {name: parameter.shape for name, parameter in spec.parameters.items()}
    for name in sorted(found | needed):
        if found.get(name) != needed.get(name):
            raise UserError(
                f"config is of another model than state: {name} has shape {found.get(name)} in "
                f"state, but config needs {needed.get(name)}"
            )
    shards = _split(checkpoint_tensors(spec), jnp.dtype(dtype), max_shard_bytes)
    files, others = {SINGLE_FILE: shards[0]}, {CONFIG_FILE: config_json, **(copied or {})}
    if len(shards) > 1:
        name = f"model-{{:05d}}-of-{len(shards):05d}.safetensors"
        files = {name.format(number): shard for number, shard in enumerate(shards, start=1)}
        weight_map = {tensor.name: file for file, shard in files.items() for tensor in shard}
        size = sum(_size(tensor, jnp.dtype(dtype)) for shard in shards for tensor in shard)
        others[INDEX_FILE] = {"metadata": {"total_size": size}, "weight_map": weight_map}
    folder = _Folder(directory, replace)
    return folder.write(files, others, parameters, dtype=dtype, lora=spec.lora)


def config_like(
    spec: ModelSpec, dtype: str, like: str | Path | None, eos: Sequence[int] = ()
) -> dict[str, Any]:
    """Returns the contents of config.json; for the arguments see `save_hf`."""
    first = {} if like is None else read_json(Path(like) / CONFIG_FILE)
    first = {name: value for name, value in first.items() if name not in _STALE}
    found = _UNKNOWN_TOKENS | first | hf_config(spec, dtype)
    if eos:
        found["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos)
    return found


def save_peft(
    directory: str | Path,
    spec: ModelSpec,
    parameters: Mapping[str, Array],
    *,
    base: Mapping[str, Array],
    base_name: str | None,
    revision: str | None = None,
    copied: Mapping[str, Path | dict[str, Any]] | None = None,
) -> Path:
    """Writes adapters, fp32, as a folder that PEFT loads; replaces an older one.

    All processes must call this.

    Args:
        directory: target folder; must not exist, be empty or contain adapters.
        spec: the model, with adapters.
        parameters: the adapters by name.
        base: the parameters of their base by name, which identify it.
        base_name: folder of the base, or OWNER/NAME of its repository.
        revision: commit in the repository.
        copied: extra files by name, as in `save_hf`.

    Raises:
        UserError: the folder is in use or not writable; nothing is left.
    """
    directory = Path(directory)
    folder = _Folder(directory, (directory / PEFT_CONFIG).is_file())
    files = {PEFT_FILE: adapter_tensors(spec)}
    others = {PEFT_CONFIG: peft_config(spec, base_name, revision), **(copied or {})}
    metadata = {BASE_DIGEST: digest(base)}
    return folder.write(files, others, parameters, dtype="float32", metadata=metadata)


def _split(
    tensors: list[CheckpointTensor], dtype: jnp.dtype, max_bytes: int
) -> list[list[CheckpointTensor]]:
    """Assigns tensors to files, in order."""
    shards: list[list[CheckpointTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        size = _size(tensor, dtype)
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    return shards


def _size(tensor: CheckpointTensor, dtype: jnp.dtype) -> int:
    return math.prod(tensor.shape) * dtype.itemsize


def _gather(
    parameters: Mapping[str, Array], part: Part, dtype: str, lora: LoraSpec | None
) -> Array:
    """Returns a parameter, or a layer or expert of it, on every process; a collective operation.

    It is merged with its adapter, if it has one.
    """
    module = part.parameter.removesuffix(".weight")
    names = part.parameter, *(f"{module}.{factor}.weight" for factor in FACTORS)
    found = tuple(parameters[name] for name in names if name in parameters)
    sharding, replicated = getattr(found[0], "sharding", None), None
    if isinstance(sharding, NamedSharding):
        replicated = NamedSharding(sharding.mesh, PartitionSpec())
    scale = 0.0 if lora is None else lora.scale
    how = {"dtype": dtype, "sharding": replicated, "scale": scale}
    return _merged(found, part.index, **how).addressable_data(0)


@functools.partial(jax.jit, static_argnames=("dtype", "sharding", "scale"))
def _merged(
    found: tuple[Array, ...],
    index: tuple[int, ...],
    *,
    dtype: str,
    sharding: Sharding | None,
    scale: float,
) -> Array:
    for place in index:
        found = tuple(jax.lax.dynamic_index_in_dim(x, place, keepdims=False) for x in found)
    x, *factors = map(to_device, found)
    if factors:
        x = x.astype(jnp.float32) + scale * dot32("ri,or->oi", *factors)
    x = x.astype(dtype)
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


def assembled(tensor: CheckpointTensor, parts: list[Array]) -> np.ndarray:
    """Returns a tensor of its parts."""
    if tensor.parts[0].alternating:
        columns = [np.swapaxes(np.asarray(x), 1, -1) for x in parts]
        # safetensors writes the memory of an array, whatever its strides are.
        return np.ascontiguousarray(np.stack(columns, axis=-1)).reshape(tensor.shape)
    if len(parts) == 1:
        return np.asarray(parts[0])
    found = np.zeros(tensor.shape, parts[0].dtype)
    for part, array in zip(tensor.parts, parts, strict=True):
        starts = zip(array.shape, (part.first_row, part.first_column), strict=False)
        found[tuple(slice(first, first + size) for size, first in starts)] = array
    return found


class _Folder:
    """A folder with a temporary name until it is published."""

    def __init__(self, target: Path, replace: bool) -> None:
        self.target, self.replace = target, replace
        self.temporary = target.absolute().with_name(f".{target.name}.tmp")
        self.old = self.temporary.with_suffix(".old")

    def write(
        self,
        files: Mapping[str, Iterable[CheckpointTensor]],
        others: Mapping[str, Path | dict[str, Any]],
        parameters: Mapping[str, Array],
        *,
        dtype: str,
        lora: LoraSpec | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Path:
        """Writes files of tensors and others, and publishes the folder; all processes call it."""
        is_first = jax.process_index() == 0
        try:
            self._on_first(self.make)
            for file, listed in files.items():
                tensors = {}
                for tensor in listed:
                    parts = [_gather(parameters, part, dtype, lora) for part in tensor.parts]
                    if is_first:
                        tensors[tensor.name] = assembled(tensor, parts)
                self._on_first(self.write_tensors, file, tensors, metadata)
            self._on_first(self.write_others, others)
            self._on_first(self.publish)
        finally:
            if is_first:
                shutil.rmtree(self.temporary, ignore_errors=True)
        return self.target

    def make(self) -> None:
        in_use = self.target.exists() and (not self.target.is_dir() or any(self.target.iterdir()))
        if in_use and not (self.replace and self.target.is_dir()):
            raise UserError(f"{self.target} exists and is not an empty folder; use another folder")
        self.temporary.parent.mkdir(parents=True, exist_ok=True)
        if self.replace and self.old.exists() and not self.target.exists():  # killed in `publish`
            self.old.rename(self.target)
        for left in (self.temporary, self.old):  # by a process that was killed
            if left.exists():
                shutil.rmtree(left)
        self.temporary.mkdir()

    def write_tensors(
        self, file: str, tensors: dict[str, np.ndarray], metadata: Mapping[str, str] | None
    ) -> None:
        path = self.temporary / file
        save_file(tensors, path, metadata={"format": "pt", **(metadata or {})})
        if metadata:
            _sort_metadata(path)
        mask = os.umask(0)
        os.umask(mask)
        path.chmod(0o666 & ~mask)  # safetensors creates files that only their owner can read
        _flush(path)

    def write_others(self, files: Mapping[str, Path | dict[str, Any]]) -> None:
        for name, content in files.items():
            path = self.temporary / name
            path.parent.mkdir(exist_ok=True)
            if isinstance(content, Path):
                shutil.copyfile(content, path)
            else:
                path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            _flush(path)

    def publish(self) -> None:
        _flush(self.temporary)
        if self.replace and self.target.exists():
            # Renaming cannot replace a folder that is not empty, so it is moved away first.
            self.target.rename(self.old)
            self.temporary.rename(self.target)
            shutil.rmtree(self.old)
        else:
            self.temporary.rename(self.target)
        _flush(self.target.absolute().parent)

    def _on_first(self, step: Callable[..., None], *arguments: Any) -> None:
        """Runs a step on the first process; all processes raise its error, so that none waits."""
        problem = ""
        if jax.process_index() == 0:
            try:
                step(*arguments)
            except UserError as error:
                problem = str(error)
            except (OSError, SafetensorError) as error:
                problem = f"cannot write {self.target}: {error}"
        failed = bool(problem)
        if jax.process_count() > 1:
            failed = bool(multihost_utils.broadcast_one_to_all(np.asarray(failed)))
        if failed:
            raise UserError(problem or "the first process could not write the checkpoint")


def _sort_metadata(path: Path) -> None:
    """Sorts the metadata of a safetensors file, which otherwise has another order each time."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False)
        file.seek(8)
        file.write(text.encode().ljust(size))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
