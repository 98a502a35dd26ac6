"""Reads checkpoints: the full state onto any mesh, or only the parameters.

The folder of the checkpoints is not changed, so its run may still be active. That is why nothing
here uses `ocp.CheckpointManager`, which deletes what an active run is writing.
"""

import dataclasses
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from jax import Array

from mtraining_jax.config import Config
from mtraining_jax.training.checkpoint.checksums import checksums
from mtraining_jax.training.checkpoint.errors import damaged, unreadable
from mtraining_jax.training.checkpoint.orbax_errors import print_errors_once
from mtraining_jax.training.checkpoint.same_model import check_same_model, check_shapes
from mtraining_jax.training.state import TrainState


def read_record(folder: Path, step: int) -> dict[str, Any]:
    """Reads the record of a checkpoint: `config`, `loader`, `shapes` and `checksums`."""
    record = _read(folder, step, record=ocp.args.JsonRestore()).record
    parts = {"config", "loader", "shapes", "checksums"}
    if not isinstance(record, dict) or not parts <= record.keys():
        raise damaged(folder / str(step), "its record is incomplete")
    return record


def read_state(
    folder: Path, step: int, abstract: TrainState, config: Config
) -> tuple[TrainState, dict[str, Any]]:
    """Reads the state and the position of the data loader.

    `abstract` has the shapes and shardings to restore; the mesh may differ from that of the save.

    Raises:
        UserError: if the checkpoint is unreadable or damaged, or has another model or other
            trained parameters.
    """
    record = read_record(folder, step)
    check_same_model(folder / str(step), record["config"], config)
    check_shapes(folder / str(step), record["shapes"], abstract.parameters)
    wanted = {field.name: getattr(abstract, field.name) for field in dataclasses.fields(abstract)}
    arrays = _read_arrays(folder, step, ocp.args.StandardRestore(wanted), record)
    return TrainState(**arrays), record["loader"]


def read_parameters(folder: Path, step: int, abstract: dict[str, Any]) -> dict[str, Array]:
    """Reads the fp32 parameters of a checkpoint by name, without optimizer state.

    `abstract` has a `jax.ShapeDtypeStruct` with target sharding of each. Raises a UserError if the
    checkpoint is unreadable or damaged, or has other parameters.
    """
    record = read_record(folder, step)
    check_shapes(folder / str(step), record["shapes"], abstract)
    wanted = {"parameters": abstract}
    restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
    restore = ocp.args.PyTreeRestore(wanted, restore_args=restore_args, partial_restore=True)
    return _read_arrays(folder, step, restore, record)["parameters"]


def _read_arrays(folder: Path, step: int, restore: Any, record: dict[str, Any]) -> dict[str, Any]:
    arrays = _read(folder, step, arrays=restore).arrays
    for name, number in checksums(arrays).items():
        if record["checksums"].get(name) != number:
            raise damaged(folder / str(step), f"the checksum of {name} does not match")
    return arrays


def _read(folder: Path, step: int, **items: Any) -> Any:
    path = folder / str(step)
    print_errors_once()
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
            return reader.restore(path.absolute(), args=ocp.args.Composite(**items))
    except Exception as error:  # Orbax raises many types, for parsing and I/O
        raise unreadable(path, error) from error
