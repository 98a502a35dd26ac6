"""Configuration files: lookup by name or path, and inheritance.

A file inherits from another with `base = "qwen3b_512k"`, or a path relative to its own folder.
"""

import difflib
import tomllib
from pathlib import Path
from typing import Any

from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import toml_value
from mtraining_jax.utils.file_limits import absence, is_url, read_text

_PACKAGE = Path(__file__).resolve().parents[1]


def config_folder() -> Path:
    """The folder of named configurations, in the checkout or the installed package."""
    checkout = _PACKAGE.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / "configs").is_dir():
        return checkout / "configs"
    return _PACKAGE / "configs"


def available_configs() -> list[str]:
    """Sorted names of the configurations in `config_folder()`."""
    return sorted(path.stem for path in config_folder().glob("*.toml"))


def read_chain(
    name: str, folder: Path = Path(), derived: tuple[Path, ...] = ()
) -> list[tuple[str, dict[str, Any]]]:
    """Reads a file and its chain of base files: their paths and tables, the file itself first.

    `name` may be a path relative to `folder`. `run.name` is not inherited: every file has its own
    run folder. `derived` files inherit from this one.
    """
    path = _find(name, folder)
    if any(path.resolve() == file.resolve() for file in derived):
        cycle = " -> ".join(map(str, (*derived, path)))
        raise UserError(f"the base files form a cycle: {cycle}")
    table = _read(path)
    if "base" not in table:
        return [(str(path), table)]
    base = table.pop("base")
    what = f"{path}: base = {toml_value(base) if isinstance(base, str) else base}"
    if not isinstance(base, str) or not base:
        raise UserError(f"{what} must be the name of a configuration or the path of a TOML file")
    try:
        bases = read_chain(base, path.parent, (*derived, path))
    except UserError as error:
        raise UserError(f"{what}: {error}") from None
    for _, inherited in bases:
        if isinstance(inherited.get("run"), dict):
            inherited["run"].pop("name", None)
    return [(str(path), table), *bases]


def _find(name: str, folder: Path) -> Path:
    if is_url(name):
        raise UserError(f"the configuration file {name} {absence(name)}")
    if name.endswith(".toml") or len(Path(name).parts) > 1:
        return folder / Path(name).expanduser()
    names = available_configs()
    if name in names:
        path, here = config_folder() / f"{name}.toml", Path.cwd()
        return path.relative_to(here) if path.is_relative_to(here) else path  # for messages
    file = f"{name}.toml"
    close = [file] if (folder / file).is_file() else difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {close[0]}? Choose" if close else "choose"
    raise UserError(
        f'unknown configuration "{name}"; {hint} one of {", ".join(names)} or pass the path of a '
        ".toml file"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path)
    except FileNotFoundError:
        others = [str(x) for x in path.parent.glob("*.toml") if x.is_file()]
        close = difflib.get_close_matches(str(path), others, 1)
        if path.stem in available_configs():
            close = [f"--config {path.stem}"]
        hint = f"; did you mean {close[0]}?" if close and not path.is_symlink() else ""
        raise UserError(f"the configuration file {path} {absence(path)}{hint}") from None
    except OSError as error:
        inside = path / "config.toml"
        hint = f"; did you mean {inside}?" if inside.is_file() else ""
        raise UserError(f"{path} cannot be read: {error.strerror}{hint}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: invalid byte at {error.start}") from error
    try:
        return tomllib.loads(text.removeprefix("\ufeff"))  # byte-order mark
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error
    except ValueError as error:  # Python limits digits
        raise UserError(f"{path} has a number of too many digits") from error
