"""The results of an evaluation: one JSON line per sample, appended when the sample is finished.

The same command resumes a killed evaluation at the sample that it was working on.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from mtraining_jax.utils.errors import UserError

SAMPLES_NAME = "samples.jsonl"
SETTINGS_NAME = "settings.json"
# One line per run of the command: date, devices and versions.
INVOCATIONS_NAME = "invocations.jsonl"

# One line of the file.
Line = dict[str, Any]


class Key(NamedTuple):
    """The key of a line, one line per key; `model` is a label such as "model"."""

    model: str
    attention: str
    task: str
    length: int
    number: int

    @classmethod
    def of(cls, line: Line) -> Self:
        try:
            return cls(*(line[name] for name in cls._fields))
        except (KeyError, TypeError) as error:
            raise ValueError(f"a line of results must have {', '.join(cls._fields)}") from error


class Results:
    """A folder of results, open for new lines in a `with` block.

    Its settings must agree with those of earlier lines wherever both have a value. UserError if
    they do not, or a line is damaged.

    Attributes:
        last_date: When a command last evaluated into the folder; None if unknown.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self._lines = {Key.of(line): line for line in read_lines(self.folder)}
        # Settings without any line are ignored.
        before = read_settings(self.folder) if self._lines else {}
        now = json.loads(json.dumps(settings))  # turns tuples into lists
        self.settings = _joined(before, now, "", self.folder)
        self.last_date = [{}, *read_invocations(self.folder)][-1].get("date")

    def __contains__(self, key: Key) -> bool:
        return key in self._lines

    def __getitem__(self, key: Key) -> Line:
        return self._lines[key]

    def check_model(self, label: str, digests: Mapping[str, str]) -> None:
        """Checks that the lines of a label are of the model with these digests, and records them.

        A UserError if one differs, or the lines are of a model without digests.
        """
        about = self.settings["models"][label]
        known = about.get("digest") if any(key.model == label for key in self._lines) else {}
        if known is None:
            raise UserError(
                f"{self.folder} has results of {about['name']} without a digest of its parameters, "
                "so they may be of another model of this name; use another --output"
            )
        about["digest"] = _joined(known, dict(digests), f"models.{label}.digest", self.folder)

    def add(self, line: Line) -> None:
        text = json.dumps(line, allow_nan=False, ensure_ascii=False)
        self._lines[Key.of(line)] = line
        # A single write, so an interruption cannot split the line.
        self._file.write(text + "\n")
        self._file.flush()

    def note(self, facts: Mapping[str, Any]) -> None:
        """Records when and on which devices the command ran, for the report."""
        with (self.folder / INVOCATIONS_NAME).open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")

    @property
    def lines(self) -> list[Line]:
        return list(self._lines.values())

    def __enter__(self) -> Self:
        path, settings = self.folder / SAMPLES_NAME, self.folder / SETTINGS_NAME
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
            # The last line may be incomplete after a kill.
            self._file.truncate(path.read_bytes().rfind(b"\n") + 1)
            if self.settings != read_settings(self.folder):
                new = settings.with_suffix(".json.new")
                new.write_text(json.dumps(self.settings, indent=1) + "\n", encoding="utf-8")
                new.replace(settings)
        except OSError as error:
            raise UserError(f"{self.folder}: results are not writable: {error.strerror}") from None
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _joined(before: Any, now: Any, name: str, folder: Path) -> Any:
    """Merges nested settings; values that both have must be equal."""
    if isinstance(before, dict) and isinstance(now, dict):
        prefix = name and f"{name}."
        both = before.keys() & now.keys()
        joined = {key: _joined(before[key], now[key], prefix + key, folder) for key in both}
        return before | now | joined
    if before != now:
        raise UserError(
            f"{folder} has results with {name} = {json.dumps(before)}, but this evaluation has "
            f"{json.dumps(now)}; use another --output, or the earlier value"
        )
    return now


def read_lines(folder: Path) -> Iterator[Line]:
    """Yields the complete lines of a folder, none without a file; a damaged one is a UserError."""
    path = folder / SAMPLES_NAME
    for number, text in enumerate(_lines_of(path), 1):
        try:
            line = json.loads(text)
            Key.of(line)
        except ValueError:
            raise UserError(
                f"{path}, line {number} is not a result of an evaluation; delete the line to "
                "evaluate its sample again"
            ) from None
        yield line


def read_settings(folder: Path) -> dict[str, Any]:
    """Returns the settings of a folder's lines; empty without a file."""
    path = folder / SETTINGS_NAME
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{path} is not a JSON object; use another --output")
    return found


def read_invocations(folder: Path) -> list[dict[str, Any]]:
    """Returns what `Results.note` has written; damaged lines are skipped."""
    found = []
    for text in _lines_of(folder / INVOCATIONS_NAME):
        with contextlib.suppress(ValueError):
            found.append(json.loads(text))
    return found


def _lines_of(path: Path) -> Iterator[bytes]:
    """Yields the complete lines of a file, none without it; a kill may leave the last one torn."""
    if path.is_file():
        with path.open("rb") as file:
            yield from (text for text in file if text.endswith(b"\n"))
