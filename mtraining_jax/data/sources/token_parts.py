"""Folders of pre-tokenized parts, read by `data.source = "tokens"`.

A part has `part-00000.npy` (token ids, each document with its end token), `part-00000.npy.lengths`
(tokens per document), `part-00000.npy.mask` (bool, if documents have label masks) and
`part-00000.json`, written last to mark the part complete. `token_parts.json` describes the origin
of the parts and whether all of them exist.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mtraining_jax.data.files import errors_as
from mtraining_jax.data.masked import MaskedTokens
from mtraining_jax.data.tokenizer import BYTES, make_tokenizer
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.invocation import command_of

MANIFEST = "token_parts.json"
LENGTHS, MASK = ".lengths", ".mask"  # after the name of a token file
# In the identity of a folder.
TOKENIZER = "data.tokenizer", "checksum of the tokenizer"
BOS = "data.bos"  # a list of ids; None if the documents are token ids, bytes or conversations
_VERSION = 1


@dataclass(frozen=True)
class PartRecord:
    """Content of a complete part; `tokens` includes end tokens, `trained` is None without masks."""

    documents: int
    tokens: int
    checksum: int
    trained: int | None = None
    notes: Mapping[str, int] = field(default_factory=dict)  # numbers of documents


def write_part(
    folder: Path,
    number: int,
    tokens: MaskedTokens,
    lengths: np.ndarray,
    checksum: int,
    notes: Mapping[str, int],
) -> PartRecord:
    """Writes part `number`, from 0: tokens [n], and `lengths` [d] of its documents, with sum n."""
    tokens_file, lengths_file, mask_file, record_file = _files(folder, number)
    mask = tokens.trained
    trained = None if mask is None else int(mask.sum())
    record = PartRecord(int(lengths.size), int(tokens.ids.size), checksum, trained, dict(notes))
    _replace(lengths_file, lambda file: np.save(file, lengths))
    if mask is None:
        mask_file.unlink(missing_ok=True)
    else:
        _replace(mask_file, lambda file: np.save(file, mask))
    _replace(tokens_file, lambda file: np.save(file, tokens.ids))
    _replace(record_file, lambda file: file.write(json.dumps(asdict(record)).encode()))
    return record


def read_record(folder: Path, number: int) -> PartRecord | None:
    """The record of a part; None if it is missing or incomplete."""
    *content, mask_file, record_file = _files(folder, number)
    try:
        record = PartRecord(**json.loads(record_file.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
    if record.trained is not None:
        content.append(mask_file)
    return record if all(path.is_file() for path in content) else None


def open_folder(folder: Path, identity: Mapping[str, Any]) -> None:
    """Creates a folder of parts, or resumes one with the same (JSON-serializable) identity."""
    with errors_as(UserError, f"{folder} cannot be written", OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / MANIFEST).exists():
            if any(not path.name.startswith(".") for path in folder.iterdir()):
                raise UserError(f"{folder} has other files: choose an empty folder")
            _write_manifest(folder, {"complete": False, "identity": dict(identity)})
    known = _identity(folder)
    for name, value in json.loads(json.dumps(dict(identity))).items():
        if known.get(name) != value:
            raise UserError(
                f"{folder} was started with {name} = {json.dumps(known.get(name))}, but now it is "
                f"{json.dumps(value)}: choose another folder"
            )


def mark_incomplete(folder: Path) -> None:
    """Marks a folder incomplete while its parts change."""
    manifest = _manifest(folder)
    if manifest["complete"]:
        _write_manifest(folder, manifest | {"complete": False})


def close_folder(folder: Path, parts: int, totals: Mapping[str, int]) -> None:
    """Marks the folder complete; deletes stale parts and temporary files."""
    for path in folder.glob(".part-*"):
        path.unlink(missing_ok=True)
    for path in folder.glob("part-*.json"):
        number = int(path.stem.removeprefix("part-"))
        if number >= parts:
            for stale in reversed(_files(folder, number)):
                stale.unlink(missing_ok=True)
    _write_manifest(folder, _manifest(folder) | {"complete": True, "parts": parts, **totals})


def check_parts(folder: Path, tokenizer: str) -> None:
    """Checks that a folder of parts is complete and made with `data.tokenizer`, unless "bytes".

    Accepts any other folder.
    """
    if (folder / MANIFEST).is_file() and not _manifest(folder).get("complete"):
        raise UserError(
            f"data.paths: {folder} is incomplete: {command_of('tokenize_corpus')} has not "
            "finished; run the same command again to resume it"
        )
    known = tokenizer_of(folder)
    if tokenizer == BYTES or known is None:
        return
    name, checksum = known
    if make_tokenizer(tokenizer, eos=0).checksum != checksum:
        raise UserError(
            f'data.paths: {folder} was made with data.tokenizer = "{name}", which is another '
            f'tokenizer than "{tokenizer}"; set data.tokenizer to that one, or tokenize again'
        )


def tokenizer_of(folder: Path) -> tuple[str, int | None] | None:
    """The value of data.tokenizer and the checksum of a folder of parts, if known."""
    name, checksum = map(_identity(folder).get, TOKENIZER)
    return None if name is None else (name, checksum)


def bos_of(folder: Path) -> tuple[int, ...] | None:
    """The ids that begin the documents of a folder of parts, if known."""
    bos = _identity(folder).get(BOS)
    return None if bos is None else tuple(bos)


def _identity(folder: Path) -> dict[str, Any]:
    """The identity of a folder of parts; empty for another folder."""
    known = _manifest(folder).get("identity", {}) if (folder / MANIFEST).is_file() else {}
    if known.get(TOKENIZER[0]) in (None, BYTES) or known.get("data.messages_field"):
        return known
    return {BOS: [], **known}  # earlier versions put no token before a text


def ends_of(folder: Path) -> tuple[bool, int | None]:
    """Whether a folder of parts has conversations, and the end token of its other documents."""
    known = _identity(folder)
    is_chat = known.get("data.messages_field") is not None
    return is_chat, None if is_chat else known.get("data.eos")


def _files(folder: Path, number: int) -> tuple[Path, ...]:
    """The files of tokens, document lengths and label masks, and the record of a part."""
    name = f"part-{number:05}"
    return *(folder / f"{name}.npy{end}" for end in ("", LENGTHS, MASK)), folder / f"{name}.json"


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    with errors_as(UserError, f"{path} cannot be read", OSError, ValueError, KeyError, TypeError):
        known = json.loads(path.read_bytes())
        if known["version"] != _VERSION:
            raise ValueError(f"version {known['version']} instead of {_VERSION}")
        return known


def _write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps({"version": _VERSION, **content}, indent=1).encode()
    _replace(folder / MANIFEST, lambda file: file.write(text))


def _replace(path: Path, write: Callable[[Any], object]) -> None:
    """Writes a file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
