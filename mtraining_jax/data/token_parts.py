"""A folder of token files that one command writes in parts and later runs read as `tokens`.

A part has three files: `part-00000.npy` (token ids, each document with its end token),
`part-00000.npy.lengths` (tokens of each document), and `part-00000.json`, which is written last and
says that the part is whole. `token_parts.json` says what the parts are made of, and whether all of
them are there. Files get their names when they are complete, so a command that is stopped anywhere
leaves nothing that looks whole and is not.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtraining_jax.data.files import first_line
from mtraining_jax.errors import UserError

MANIFEST = "token_parts.json"
LENGTHS = ".lengths"  # after the name of a token file
_VERSION = 1


@dataclass(frozen=True)
class PartRecord:
    """What a whole part holds.

    Attributes:
        documents: how many, empty ones too.
        tokens: how many, with end tokens.
        checksum: CRC-32 of the documents before they became tokens.
    """

    documents: int
    tokens: int
    checksum: int


def write_part(
    folder: Path, number: int, ids: np.ndarray, lengths: np.ndarray, checksum: int
) -> PartRecord:
    """Writes one part.

    Args:
        folder: of all parts.
        number: of this one, from 0.
        ids: unsigned integers [n].
        lengths: integers [d], tokens of each document; their sum is n.
        checksum: for the record.

    Raises:
        OSError: it cannot be written.
    """
    path = _path(folder, number)
    _replace(path.with_name(path.name + LENGTHS), lambda file: np.save(file, lengths))
    _replace(path, lambda file: np.save(file, ids))
    record = PartRecord(int(lengths.size), int(ids.size), checksum)
    text = json.dumps(asdict(record)).encode()
    _replace(path.with_suffix(".json"), lambda file: file.write(text))
    return record


def read_record(folder: Path, number: int) -> PartRecord | None:
    """The record of a part; None if the part is not there, or not whole."""
    path = _path(folder, number)
    try:
        record = PartRecord(**json.loads(path.with_suffix(".json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
    return record if path.is_file() and path.with_name(path.name + LENGTHS).is_file() else None


def open_folder(folder: Path, identity: Mapping[str, Any]) -> None:
    """Begins a folder of parts, or goes on with one that was begun for the same.

    Args:
        folder: made if it is not there.
        identity: what decides the content of all parts; JSON can hold it.

    Raises:
        UserError: the folder holds something else.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / MANIFEST).exists():
            if any(not path.name.startswith(".") for path in folder.iterdir()):
                raise UserError(f"{folder} holds other files already: name a folder of its own")
            _write_manifest(folder, {"complete": False, "identity": dict(identity)})
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror})") from error
    known = _manifest(folder).get("identity", {})
    for name, value in json.loads(json.dumps(dict(identity))).items():
        if known.get(name) != value:
            raise UserError(
                f"{folder} was begun with {name} = {json.dumps(known.get(name))}, and now it is "
                f"{json.dumps(value)}: name another folder"
            )


def mark_incomplete(folder: Path) -> None:
    """Says that parts are being written."""
    if _manifest(folder)["complete"]:
        _write_manifest(folder, {**_manifest(folder), "complete": False})


def close_folder(folder: Path, parts: int, totals: Mapping[str, int]) -> None:
    """Says that all parts are there; what is left of others and of stopped commands goes away."""
    for path in folder.glob(".part-*"):
        path.unlink(missing_ok=True)
    for path in folder.glob("part-*.json"):
        if int(path.stem.removeprefix("part-")) >= parts:
            for stale in (path, path.with_suffix(".npy"), path.with_suffix(".npy" + LENGTHS)):
                stale.unlink(missing_ok=True)
    known = _manifest(folder)
    _write_manifest(folder, {**known, "complete": True, "parts": parts, **totals})


def check_complete(folder: Path) -> None:
    """Checks that nothing is missing from a folder of parts; any other folder passes.

    Raises:
        UserError: the command that writes it has not ended.
    """
    if (folder / MANIFEST).is_file() and not _manifest(folder).get("complete"):
        raise UserError(
            f"data.paths: {folder} is not complete: the command that tokenises has not ended there;"
            " the same command goes on"
        )


def _path(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05}.npy"


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        known = json.loads(path.read_bytes())
        if known["version"] != _VERSION:
            raise ValueError(f"version {known['version']} instead of {_VERSION}")
        return known
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({first_line(error)})") from error


def _write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps({"version": _VERSION, **content}, indent=1).encode()
    _replace(folder / MANIFEST, lambda file: file.write(text))


def _replace(path: Path, write: Any) -> None:
    """Writes a file beside its place, and moves it there when it is on disk."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
