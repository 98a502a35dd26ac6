"""Registries of plug-ins: sparse patterns, data sources and model families.

Modules are imported on first use. Imports no JAX.
"""

import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mtraining_jax.utils.errors import UserError


class Registry:
    """Classes by name.

    Args:
        what: kind of plug-in for error messages, e.g. "sparse pattern".
        base: base class of all plug-ins, as `module:Class`.
        built_in: built-in plug-ins, name -> `module:Class`.
    """

    def __init__(self, what: str, base: str, built_in: Mapping[str, str]) -> None:
        self.what, self._base = what, base
        self._places = dict(built_in)
        self._built_in = tuple(built_in)
        self._loaded: dict[str, type] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the built-in plug-ins."""
        return self._built_in

    def names_any(self, names: Iterable[str]) -> bool:
        """Whether any of the names is built in."""
        return any(name in self._built_in for name in names)

    def get(self, name: str) -> Any:
        """The class of a built-in name or of `package.module:Class`, which is then registered.

        The module of the latter may also be in the current folder.

        Raises:
            UserError: unknown name, failed import or wrong base class.
        """
        if name in self._loaded:
            return self._loaded[name]
        if name not in self._places and ":" not in name:
            known = ", ".join(self._built_in)
            raise UserError(
                f'unknown {self.what} "{name}"; choose one of {known} or pass package.module:Class'
            )
        if name not in self._places and (here := str(Path.cwd())) not in sys.path:
            sys.path.append(here)
        found = _load(self._places.get(name, name), name, self.what)
        base = _load(self._base, name, self.what)
        if not (isinstance(found, type) and issubclass(found, base)):
            raise UserError(f'"{name}" is not a {self.what}: it must be a subclass of {self._base}')
        self._places.setdefault(name, name)
        self._loaded[name] = found
        return found

    def remove(self, name: str) -> None:
        """Forgets a plug-in that is not built in."""
        self._loaded.pop(name, None)
        self._places.pop(name, None)

    def classes(self) -> dict[str, type]:
        """All registered classes by name, in order of registration."""
        return {name: self.get(name) for name in self._places}


def _load(place: str, name: str, what: str) -> Any:
    module_name, _, attribute = place.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f'"{name}" cannot be loaded as a {what}: {error}') from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise UserError(
            f'"{name}" cannot be loaded as a {what}: {module_name} has no {attribute!r}'
        ) from None
