"""Reads only the parameters of a checkpoint, for evaluation and generation."""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from jax import Array

from mtraining_jax.training.checkpoint.checksums import checksums
from mtraining_jax.training.checkpoint.orbax_errors import print_errors_once
from mtraining_jax.training.checkpoint.reading import damaged, unreadable
from mtraining_jax.utils.errors import UserError

_PARAMETERS = "parameters"


def read_record(folder: Path, step: int) -> dict[str, Any]:
    """Reads the record of a checkpoint: `config`, `loader`, `shapes` and `checksums`.

    The folder of the checkpoints is not changed, so the run may still be active.

    Raises:
        UserError: if the checkpoint is unreadable or damaged.
    """
    record = _read(folder, step, record=ocp.args.JsonRestore()).record
    for part in ("config", "shapes", "checksums"):
        if not isinstance(record, dict) or part not in record:
            raise damaged(folder / str(step), "its record is incomplete")
    return record


def read_parameters(folder: Path, step: int, abstract: dict[str, Any]) -> dict[str, Array]:
    """Reads the fp32 parameters of a checkpoint by name, without optimizer state.

    Args:
        folder, step: as in `read_record`.
        abstract: `jax.ShapeDtypeStruct` with target shardings, by name.

    Raises:
        UserError: if the checkpoint is unreadable or damaged, or has other parameters.
    """
    path = folder / str(step)
    record = read_record(folder, step)
    for name in sorted(abstract.keys() | record["shapes"].keys()):
        needed = list(abstract[name].shape) if name in abstract else None
        if record["shapes"].get(name) != needed:
            raise UserError(
                f"{path} is a checkpoint of another model: its parameter {name} has shape "
                f"{record['shapes'].get(name)}, but {needed} is needed"
            )
    wanted = {_PARAMETERS: abstract}
    how = ocp.checkpoint_utils.construct_restore_args(wanted)
    restore = ocp.args.PyTreeRestore(wanted, restore_args=how, partial_restore=True)
    arrays = _read(folder, step, arrays=restore).arrays
    for name, number in checksums(arrays).items():
        if record["checksums"].get(name) != number:
            raise damaged(path, f"the checksum of {name} does not match")
    return arrays[_PARAMETERS]


def _read(folder: Path, step: int, **items: Any) -> Any:
    path = (folder / str(step)).absolute()
    print_errors_once()
    # Not a `CheckpointManager`, which would delete what an active run is writing.
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
            return reader.restore(path, args=ocp.args.Composite(**items))
    except Exception as error:  # Orbax raises many types, for parsing and I/O
        raise unreadable(folder / str(step), error) from error
