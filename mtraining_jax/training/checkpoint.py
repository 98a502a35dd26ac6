"""Checkpoints: the whole state of a run, saved in the background, read back on any mesh.

A checkpoint is the folder `checkpoints/STEP` of a run. Orbax writes it under another name and
renames it when all of it is on disk, so a run killed while saving leaves no half checkpoint
behind. It holds the arrays of a `TrainState` and one JSON record: configuration, place in the
data, and a checksum of every array, for a changed byte inside a compressed array would otherwise
be read as numbers.
"""

import contextlib
import dataclasses
import gc
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax import Array, lax

from mtraining_jax.config import Config, config_to_dict
from mtraining_jax.config.fields import all_fields
from mtraining_jax.errors import UserError
from mtraining_jax.training.state import TrainState

# Fields of the model that may change without making another model of the parameters.
_FREE_MODEL_FIELDS = (
    "dtype", "init_from", "remat", "mlp_chunk_size", "mlp_kept_chunks", "max_position_embeddings",
)  # fmt: skip


def newest_step(folder: Path) -> int | None:
    """The step of the newest whole checkpoint under `folder`; None without one."""
    if not folder.is_dir():
        return None
    steps = [int(path.name) for path in folder.iterdir() if path.name.isdigit() and path.is_dir()]
    return max(steps, default=None)


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they are; made if it is not there.
        keep: newest checkpoints kept; older ones are deleted.
        async_save: write in the background.
    """

    def __init__(self, folder: Path, *, keep: int, async_save: bool) -> None:
        self.folder = folder.absolute()
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                enable_async_checkpointing=async_save,
                cleanup_tmp_directories=True,
            ),
        )

    def newest(self) -> int | None:
        """The step of the newest whole checkpoint; None without one."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, loader_state: Any, config: Config) -> None:
        """Saves a checkpoint, unless there is one of this step already.

        Returns when the arrays are copied, before they are on disk: the state may then be
        overwritten. All processes call it together.
        """
        if self.newest() == step:
            return
        arrays = _arrays(state)
        record = {
            "config": config_to_dict(config),
            "loader": loader_state,
            "shapes": {name: list(x.shape) for name, x in state.parameters.items()},
            "checksums": _checksums(arrays),
        }
        self._manager.save(
            step,
            args=ocp.args.Composite(
                arrays=ocp.args.StandardSave(arrays), record=ocp.args.JsonSave(record)
            ),
        )

    def restore(
        self, step: int, abstract: TrainState, config: Config
    ) -> tuple[TrainState, dict[str, Any]]:
        """Reads a checkpoint.

        Args:
            step: whose checkpoint.
            abstract: shapes and shardings to read into; the mesh may be another than the one
                that saved.
            config: of this run.

        Returns:
            The state, and where the data loader stood.

        Raises:
            UserError: if the checkpoint is damaged, or of another model or other trained
                parameters.
        """
        path = self.folder / str(step)
        record = self._read(step, record=ocp.args.JsonRestore()).record
        try:
            saved, loader_state = record["config"], record["loader"]
            shapes, checksums = record["shapes"], record["checksums"]
        except (KeyError, TypeError) as error:
            raise _damaged(path, error) from error
        _check_same_model(path, saved, shapes, abstract, config)
        arrays = self._read(step, arrays=ocp.args.StandardRestore(_arrays(abstract))).arrays
        for name, checksum in _checksums(arrays).items():
            if checksums.get(name) != checksum:
                raise _damaged(path, f"the checksum of {name} does not match")
        return TrainState(**arrays), loader_state

    def _read(self, step: int, **items: Any) -> Any:
        """Some items of a checkpoint; a UserError if they cannot be read."""
        try:
            with _late_reads_unreported():
                return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # Orbax raises many kinds, from parsing to I/O
            damaged = _damaged(self.folder / str(step), error)
        _forget_failed_reads()
        raise damaged

    def close(self) -> None:
        """Waits until all that was saved is on disk.

        Raises:
            UserError: if it could not be written.
        """
        try:
            self._manager.wait_until_finished()
        except OSError as error:
            raise UserError(f"{self.folder}: a checkpoint cannot be written ({error})") from error
        finally:
            self._manager.close()


@contextlib.contextmanager
def _late_reads_unreported() -> Iterator[None]:
    """Of reads that fail: keeps Python from reporting those that end after the first failure.

    Each wakes an event loop that Orbax has closed by then, at any time later. So when the block
    raises, the hook stays. It passes everything else on.
    """
    report = sys.unraisablehook

    def report_others(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            report(unraisable)

    sys.unraisablehook = report_others
    yield
    sys.unraisablehook = report


def _forget_failed_reads() -> None:
    """Collects what a failed read leaves behind, in silence.

    Orbax reads all arrays at once and stops at the first that fails. Python would report each
    of the others when it collects them, page upon page, around the one sentence that counts.
    """
    asyncio_log = logging.getLogger("asyncio")
    level, hook = asyncio_log.level, sys.unraisablehook
    asyncio_log.setLevel(logging.CRITICAL + 1)
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gc.collect()
    finally:
        asyncio_log.setLevel(level)
        sys.unraisablehook = hook


def _arrays(state: TrainState) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}


def _checksums(arrays: dict[str, Any]) -> dict[str, int]:
    """One number for each array, by its path; it depends on values and places, on no sharding."""
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    numbers = jax.device_get(_all_checksums([leaf for _, leaf in leaves]))
    names = (jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves)
    return {name: int(number) for name, number in zip(names, numbers, strict=True)}


@jax.jit
def _all_checksums(arrays: list[Array]) -> list[Array]:
    return [_checksum(x) for x in arrays]


def _checksum(x: Array) -> Array:
    """Sum over elements of bits * (2 * place + 1), mod 2^32: exact in any order of summing."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    place = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        place = place * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)


def _check_same_model(
    path: Path,
    saved: dict[str, Any],
    shapes: dict[str, list[int]],
    abstract: TrainState,
    config: Config,
) -> None:
    current = config_to_dict(config)
    for section, field in [
        *(("model", field) for field in current["model"] if field not in _FREE_MODEL_FIELDS),
        ("optimizer", "trainable"),
    ]:
        was = _with_defaults(f"{section}.{field}", saved.get(section, {}))
        now = current[section][field]
        # JSON has lists where a configuration may have tuples.
        if _plain(was) != _plain(now):
            what = "of another model" if section == "model" else "of other trained parameters"
            raise UserError(
                f"{path} is a checkpoint {what}: {section}.{field} = {_plain(was)} there and "
                f"{_plain(now)} here; set it to {_plain(was)}, or start anew with another "
                "run.name or with checkpoint.resume=false"
            )
    needed = {name: list(x.shape) for name, x in abstract.parameters.items()}
    for name in sorted(needed.keys() | shapes.keys()):
        if needed.get(name) != shapes.get(name):
            raise UserError(
                f"{path} is a checkpoint of another model: parameter {name} has shape "
                f"{shapes.get(name)} there and {needed.get(name)} here"
            )


def _with_defaults(name: str, saved: dict[str, Any]) -> Any:
    """The saved value of a field; those that no field had when it was saved have their defaults."""
    fields = all_fields()
    value = saved.get(name.rpartition(".")[2], _plain(fields[name].default))
    if not isinstance(value, dict):
        return value
    inner = [other for other in fields if other.rpartition(".")[0] == name]
    return {other.rpartition(".")[2]: _with_defaults(other, value) for other in inner} | value


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _damaged(path: Path, reason: object) -> UserError:
    first_line = (str(reason) or type(reason).__name__).strip().splitlines()[0][:200]
    return UserError(
        f"the checkpoint {path} is damaged ({first_line}); delete it to go on from the one before, "
        "or start anew with checkpoint.resume=false"
    )
