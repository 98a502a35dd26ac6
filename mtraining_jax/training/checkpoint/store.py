"""Saves checkpoints of the full training state in the background, and reads them onto any mesh.

A checkpoint is the folder `checkpoints/STEP` of a run. Orbax writes it under a temporary name and
renames it when it is complete, so a killed run leaves no partial checkpoint. It contains the arrays
of a `TrainState` and one JSON record with the configuration, the position in the data, and a
checksum of every array.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath  # the paths of Orbax
from jax import memory

from mtraining_jax.config import Config
from mtraining_jax.config.sections import GCS
from mtraining_jax.models.huggingface.checksums import (
    CHECKSUM_VERSION,
    checksum,
    checksum_on_host,
    digest,
)
from mtraining_jax.models.huggingface.read import check_base
from mtraining_jax.training.checkpoint.errors import (
    damaged,
    print_errors_once,
    unreadable,
    writing_into,
)
from mtraining_jax.training.checkpoint.same_model import check_same_model, check_shapes
from mtraining_jax.training.optimizer import Parameters
from mtraining_jax.training.state import PINNED_HOST, TrainState
from mtraining_jax.utils.errors import UserError

_TABLES, _VERSION = ("config", "shapes", "checksums"), "version of checksums"


def newest_step(folder: Path) -> int | None:
    """Returns the step of the newest complete checkpoint in `folder`; None without one."""
    return next(iter(saved_steps(folder)), None)


def saved_steps(folder: Path) -> list[int]:
    """Returns the steps of the complete checkpoints in `folder`, the newest first."""
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir() if _is_complete(path)]
    # Canonical names only: "007" or digits of another script are not checkpoints.
    steps = [int(name) for name in names if name.isdecimal() and name == str(int(name))]
    return sorted(steps, reverse=True)


def _is_complete(path: Path) -> bool:
    """Whether Orbax has renamed the folder of a checkpoint, or marked it in a bucket."""
    return (path / "commit_success.txt").exists() if _in_bucket(path) else path.is_dir()


def _in_bucket(path: Path) -> bool:
    return str(path).startswith(GCS)


def _absolute(path: Path) -> Path:
    return path if _in_bucket(path) else path.absolute()


class Checkpoints:
    """Writes the checkpoints of one run into `folder`, which keeps the newest `keep` of them.

    With `local`, each process has another folder, where it writes all arrays of its devices, and
    `local` is added to the record.
    """

    def __init__(
        self, folder: Path, *, keep: int, async_save: bool, local: dict[str, Any] | None = None
    ) -> None:
        self.folder, self._local = _absolute(folder), local
        print_errors_once()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=async_save, cleanup_tmp_directories=True
        )
        handlers = None
        if local is not None:
            several = ocp.options.MultiprocessingOptions(None, barrier_sync_key_prefix="local")
            options.multiprocessing_options, options.create = several, False
            options.cleanup_tmp_directories = False
            # In the background, Orbax would write as soon as another process has its folder.
            options.async_options = ocp.AsyncOptions(create_directories_asynchronously=False)
            handlers = _local_handlers(several)
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)
        before = None if _in_bucket(folder) else self.folder.stat()
        self._writing = functools.partial(writing_into, self.folder, before)
        self.newest = self._manager.latest_step  # which may still be being written
        self._newest_before = self.newest()

    def newest_complete(self) -> int | None:
        """Returns the newest step that is on disk, without reading the disk, which may hang."""
        saving = self._manager.is_saving_in_progress()
        return self._newest_before if saving else self.newest()

    def save(self, step: int, state: TrainState, loader_state: Any, config: Config) -> None:
        """Saves a checkpoint, unless this step already has one; all processes call it together.

        Returns when the arrays are copied, before they are on disk; the state may then be donated.
        Raises a UserError if this or the previous checkpoint could not be written.
        """
        if self.newest() == step:
            return
        arrays = _fields(state)
        record = {
            "config": config.to_dict(),
            "loader": loader_state,
            "shapes": {name: list(x.shape) for name, x in state.parameters.items()},
            _VERSION: CHECKSUM_VERSION,
            "checksums": _checksums(arrays),
        }
        if state.base:
            record["base"] = digest(state.base)
        record |= self._local or {}
        save = ocp.args.StandardSave if self._local is None else ocp.args.PyTreeSave
        items = ocp.args.Composite(arrays=save(arrays), record=ocp.args.JsonSave(record))
        self.wait()
        self._newest_before = self.newest()
        with self._writing():
            self._manager.save(step, args=items)

    def wait(self) -> None:
        """Waits until all checkpoints are on disk; raises a UserError if a write failed."""
        with self._writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits until all checkpoints are on disk, then ends the threads of Orbax."""
        try:
            self.wait()
        finally:
            self._manager.close()


def _local_handlers(several: Any) -> dict[str, Any]:
    """Handlers of Orbax with which every process writes, also the replicas of arrays."""
    writer = ocp.type_handlers.ArrayHandler(
        primary_host=None, replica_id=None, use_replica_parallel=False
    )
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, writer))
    arrays = ocp.PyTreeCheckpointHandler(
        multiprocessing_options=several, type_handler_registry=registry
    )
    return {
        "arrays": arrays, "record": ocp.JsonCheckpointHandler(multiprocessing_options=several)
    }  # fmt: skip


def read_record(folder: Path, step: int) -> dict[str, Any]:
    """Reads the record of a checkpoint: `config`, `loader`, `shapes` and `checksums`."""
    record = _read(folder, step, record=ocp.args.JsonRestore()).record
    parts = record if isinstance(record, dict) else {}
    tables = (isinstance(parts.get(name), dict) for name in _TABLES)
    if not all(tables) or "loader" not in record or "model" not in record["config"]:
        raise damaged(folder / str(step), "its record is incomplete")
    if not 1 <= (version := record.setdefault(_VERSION, 1)) <= CHECKSUM_VERSION:
        raise UserError(
            f"the checkpoint {folder / str(step)} has checksums of version {version}, but this "
            f"mtraining-jax verifies those up to version {CHECKSUM_VERSION}; resume with the "
            "mtraining-jax that wrote it, or start a new run with another run.name or "
            "checkpoint.resume=false"
        )
    return record


def read_state(
    folder: Path,
    step: int,
    abstract: TrainState,
    config: Config,
    load_base: Callable[[], Parameters] = dict,
) -> tuple[TrainState, dict[str, Any]]:
    """Reads the state and the record, with the configuration and position of the data loader.

    `abstract` has the shapes and shardings to restore; the mesh may differ from that of the save.
    `load_base` returns the base of adapters. Raises a UserError if the checkpoint cannot be read,
    or is of another model.
    """
    record = read_record(folder, step)
    check_same_model(folder / str(step), record["config"], config)
    check_shapes(folder / str(step), record["shapes"], abstract.parameters)
    _check_optimizer(folder / str(step), abstract)
    arrays = _read_arrays(folder, step, _fields(abstract), record)
    base = load_base() if abstract.base else {}
    check_base(folder / str(step), record.get("base"), base)
    return TrainState(**arrays, base=base), record


def _check_optimizer(path: Path, abstract: TrainState) -> None:
    """Compares the optimizer's arrays with those that are needed."""
    saved, needed = (
        {name for name in _by_name(tree) if name.startswith("opt_state")}
        for tree in (_saved(path), _fields(abstract))
    )
    if saved != needed:
        raise UserError(
            f"{path} is a checkpoint of another optimizer: {min(saved ^ needed)} is only in "
            f"{'the checkpoint' if min(saved ^ needed) in saved else 'this run'}; resume with the "
            "same one, or start a new run with another run.name or checkpoint.resume=false"
        )


def read_parameters(folder: Path, step: int, abstract: dict[str, Any]) -> Parameters:
    """Reads the parameters of a checkpoint by name, without optimizer state.

    `abstract` has a `jax.ShapeDtypeStruct` with target sharding of each. Raises a UserError if the
    checkpoint cannot be read, or has other parameters.
    """
    record = read_record(folder, step)
    check_shapes(folder / str(step), record["shapes"], abstract)
    return _read_arrays(folder, step, {"parameters": abstract}, record)["parameters"]


def check_intact(folder: Path, step: int) -> None:
    """Reads a checkpoint into host memory, without the other processes, and checks all checksums.

    Raises a UserError if the checkpoint cannot be read; `DamagedCheckpoint` if it never can.
    """
    record = read_record(folder, step)
    saved = _saved(folder / str(step))
    with _reading(folder / str(step)):
        for file in (folder / str(step) / "arrays" / "array_metadatas").glob("*"):
            json.loads(file.read_text())  # read only when it is not to the host
        on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
    arrays = _read(folder, step, arrays=ocp.args.PyTreeRestore(restore_args=on_host)).arrays
    sums = jax.tree.map(lambda x: checksum_on_host(x, record[_VERSION]), arrays)
    _compare(folder / str(step), _by_name(sums), record)


def _read_arrays(folder: Path, step: int, wanted: Any, record: dict[str, Any]) -> dict[str, Any]:
    """Reads a part of the arrays, and casts those that were saved in another dtype."""
    path = folder / str(step)
    dtypes = {name: x.dtype for name, x in _by_name(_saved(path)).items()}

    def as_saved(place: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return x.update(dtype=dtypes.get(_name(place), x.dtype))

    saved = jax.tree_util.tree_map_with_path(as_saved, wanted)
    restore_args = ocp.checkpoint_utils.construct_restore_args(saved)
    restore = ocp.args.PyTreeRestore(saved, restore_args=restore_args, partial_restore=True)
    arrays = _read(folder, step, arrays=restore).arrays
    _compare(path, _checksums(arrays, record[_VERSION]), record)
    return jax.tree.map(_cast, arrays, wanted)


def _saved(path: Path) -> Any:
    """Descriptions of the arrays of a checkpoint."""
    with _reading(path):
        arrays = epath.Path(_absolute(path)) / "arrays"
        return ocp.PyTreeCheckpointHandler().metadata(arrays).tree


def _cast(x: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    if x.dtype == wanted.dtype:
        return x
    x = jax.device_put(x, memory.Space.Device).astype(wanted.dtype)
    return jax.device_put(x, wanted.sharding)


def _compare(path: Path, checksums: dict[str, Any], record: dict[str, Any]) -> None:
    for name, number in checksums.items():
        if record["checksums"].get(name) != int(number):
            raise damaged(path, f"the checksum of {name} does not match")


def _read(folder: Path, step: int, **items: Any) -> Any:
    # Not with `ocp.CheckpointManager`, which deletes what a run that is still active is writing,
    # nor with `ocp.Checkpointer`, which waits for all processes.
    path = folder / str(step)
    with _reading(path), contextlib.closing(ocp.CompositeCheckpointHandler()) as reader:
        return reader.restore(epath.Path(_absolute(path)), args=ocp.args.Composite(**items))


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    print_errors_once()
    try:
        yield
    except Exception as error:  # Orbax raises many types, for parsing and I/O
        raise unreadable(path, error) from error


def _fields(state: TrainState) -> dict[str, Any]:
    """The arrays of a checkpoint."""
    names = (field.name for field in dataclasses.fields(state))
    return {name: getattr(state, name) for name in names if name != "base"}


def _checksums(arrays: dict[str, Any], version: int = CHECKSUM_VERSION) -> dict[str, int]:
    """Returns a checksum of each array by path, whatever its sharding.

    Compressed arrays with a changed byte may still decode to numbers.
    """
    named = _by_name(arrays)
    on_host = {name: x for name, x in named.items() if x.sharding.memory_kind == PINNED_HOST}
    found = _all_checksums({name: x for name, x in named.items() if name not in on_host}, version)
    for name, x in on_host.items():  # together they may not fit on the device
        found |= jax.block_until_ready(_all_checksums({name: x}, version))
    return {name: int(number) for name, number in jax.device_get(found).items()}


def _by_name(tree: Any) -> dict[str, Any]:
    return {_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


@functools.partial(jax.jit, static_argnums=1)
def _all_checksums(arrays: dict[str, Any], version: int) -> dict[str, Any]:
    there = jax.device_put(arrays, memory.Space.Device)
    return jax.tree.map(lambda x: checksum(x, version), there)
