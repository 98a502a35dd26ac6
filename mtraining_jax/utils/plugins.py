"""Registries of plug-ins: sparse patterns, data sources, model families and evaluation tasks."""

import importlib
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.text import choose_one_of


class Registry:
    """Classes by name; their modules are imported on first use.

    Args:
        what: kind of plug-in for error messages, e.g. "sparse pattern".
        base: base class of all plug-ins, as `module:Class`.
        public: what a user derives plug-ins from, if not from `base`.
        built_in: built-in plug-ins, name -> `module:Class`.
        groups: names of groups of plug-ins, which may be meant by a misspelled name.
        moved: former built-in plug-ins, name -> `module:Class` in a checkout of the repository.
    """

    def __init__(
        self,
        what: str,
        base: str,
        built_in: Mapping[str, str],
        public: str = "",
        groups: Collection[str] = (),
        moved: Mapping[str, str] | None = None,
    ) -> None:
        self.what, self._base, self._public = what, base, public or base
        self._built_in, self._groups, self._moved = dict(built_in), groups, moved or {}
        self._loaded: dict[str, type] = {}

    def __iter__(self) -> Iterator[str]:
        """The names of built-in plug-ins and of others that are in use."""
        return iter(self._built_in | self._loaded)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the built-in plug-ins."""
        return tuple(self._built_in)

    @property
    def words(self) -> str:
        """Description of valid names."""
        return f"one of {', '.join(f'"{name}"' for name in self.names)} or package.module:Class"

    def get(self, name: str) -> Any:
        """The class of a built-in name or of `package.module:Class`, or raises UserError.

        The module of the latter may also be in the current folder.
        """
        if name in self._loaded:
            return self._loaded[name]
        if name in self._moved:
            place = f'it is "{self._moved[name]}" now, which needs a checkout of the repository'
            raise UserError(f'{self.what} "{name}" has moved: {place}')
        if name not in self._built_in and ":" not in name:
            ways = (
                f"{choose_one_of(name, self._built_in, self._groups)} or pass package.module:Class"
            )
            raise UserError(f'unknown {self.what} "{name}"; {ways}')
        if name not in self._built_in and (here := str(Path.cwd())) not in sys.path:
            sys.path.append(here)
        found = _load(self._built_in.get(name, name), name, self.what)
        base = _load(self._base, name, self.what)
        if not (isinstance(found, type) and issubclass(found, base)):
            needed = f"it must be a subclass of {self._public}"
            raise UserError(f'"{name}" is not a {self.what}: {needed}')
        self._loaded[name] = found
        return found

    def name_of(self, cls: type) -> str:
        """The name of a class, the inverse of `get`."""
        place = f"{cls.__module__}:{cls.__qualname__}"
        return next((name for name, known in self._built_in.items() if known == place), place)


def _load(place: str, name: str, what: str) -> Any:
    module_name, _, attribute = place.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise UserError(f'"{name}" must be package.module:Class, as Python imports it')
    try:
        module = importlib.import_module(module_name)
        if not hasattr(module, attribute):
            raise ImportError(f"{module_name} has no {attribute!r}")
    except ImportError as error:
        raise UserError(f'"{name}" cannot be loaded as a {what}: {error}') from error
    return getattr(module, attribute)
