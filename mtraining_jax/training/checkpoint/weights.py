"""The parameters of a checkpoint by themselves, for those who use a model and do not train it."""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from jax import Array

from mtraining_jax.errors import UserError
from mtraining_jax.training.checkpoint.checksums import checksums
from mtraining_jax.training.checkpoint.reading import damaged, reads_end_together, unreadable

_PARAMETERS = "parameters"


def read_record(folder: Path, step: int) -> dict[str, Any]:
    """What a checkpoint says about itself: `config`, `loader`, `shapes` and `checksums`.

    Args:
        folder: of the run's checkpoints. Nothing in it is changed, so the run may still be going.
        step: whose checkpoint.

    Raises:
        UserError: if it cannot be read, or is damaged.
    """
    record = _read(folder, step, record=ocp.args.JsonRestore()).record
    for part in ("config", "shapes", "checksums"):
        if not isinstance(record, dict) or part not in record:
            raise damaged(folder / str(step), "its record is incomplete")
    return record


def read_parameters(folder: Path, step: int, abstract: dict[str, Any]) -> dict[str, Array]:
    """Reads parameters, and nothing of the optimizer.

    Args:
        folder, step: as in `read_record`.
        abstract: by name, `jax.ShapeDtypeStruct` with the shardings to read into.

    Returns:
        fp32 arrays by name.

    Raises:
        UserError: if the checkpoint cannot be read, is damaged, or has other parameters.
    """
    path = folder / str(step)
    record = read_record(folder, step)
    for name in sorted(abstract.keys() | record["shapes"].keys()):
        needed = list(abstract[name].shape) if name in abstract else None
        if record["shapes"].get(name) != needed:
            raise UserError(
                f"{path} is a checkpoint of another model: parameter {name} has shape "
                f"{record['shapes'].get(name)} there and {needed} here"
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
    # Not a `CheckpointManager`, which clears away what a run is just writing.
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader, reads_end_together():
            return reader.restore(path, args=ocp.args.Composite(**items))
    except Exception as error:  # Orbax raises many kinds, from parsing to I/O
        raise unreadable(folder / str(step), error) from error
