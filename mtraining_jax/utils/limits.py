"""Limits of fields and sequences, enforced by the configuration and by plug-in classes.

Other limits are written in place: `Annotated[float, Ge(0), Lt(1)]`.
"""

import dataclasses
import numbers
import types
import typing
from typing import Annotated, Any

import annotated_types
from annotated_types import Ge, Gt, Le, Lt

__all__ = [
    "Ge",
    "Gt",
    "Le",
    "Lt",
    "NonNegativeInt",
    "PositiveFraction",
    "PositiveInt",
    "UnitFraction",
    "check_at_most",
    "check_limits",
    "limited",
]

PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
UnitFraction = Annotated[float, Ge(0), Le(1)]
PositiveFraction = Annotated[float, Gt(0), Le(1)]

# Longest sequences: rotary embeddings are exact below 2^22 positions (models/rope/rotary.py), and
# selections sum fixed-point masses of at most 2^15 blocks in 32 bits (selection/scores).
MAX_POSITIONS = 2**22
MAX_BLOCKS = 2**15

_WORDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_KINDS = {
    "ge": annotated_types.Ge,
    "gt": annotated_types.Gt,
    "le": annotated_types.Le,
    "lt": annotated_types.Lt,
}


def limited(kind: type, **limits: float) -> Any:
    """Former spelling of `Annotated[kind, ...]`, which type checkers do not understand."""
    return Annotated[kind, *(_KINDS[name](limit) for name, limit in limits.items())]


def check_limits(settings: Any) -> None:
    """Checks the fields of a dataclass against the limits in their types.

    Raises:
        ValueError: a field exceeds its limits.
    """
    hints = typing.get_type_hints(type(settings), include_extras=True)
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        kind = hints[field.name]
        if typing.get_origin(kind) in (types.UnionType, typing.Union):
            if value is None:
                continue
            kind = typing.get_args(kind)[0]
        if typing.get_origin(kind) is typing.Literal:
            if value not in typing.get_args(kind):
                allowed = ", ".join(typing.get_args(kind))
                raise ValueError(f"{field.name}={value!r} must be one of {allowed}")
            continue
        limits = {}
        for limit in getattr(kind, "__metadata__", ()):
            limits |= {name: getattr(limit, name) for name in _WORDS if hasattr(limit, name)}
        within = {
            "ge": lambda x, y: x >= y,
            "gt": lambda x, y: x > y,
            "le": lambda x, y: x <= y,
            "lt": lambda x, y: x < y,
        }
        _check_kind(field.name, value, kind)
        if not all(within[name](value, limit) for name, limit in limits.items()):
            allowed = " and ".join(f"{_WORDS[name]} {limit:g}" for name, limit in limits.items())
            raise ValueError(f"{field.name}={value} must be {allowed}")


def _check_kind(name: str, value: Any, kind: Any) -> None:
    """Rejects values of numeric fields that are not numbers, e.g. "0.9"."""
    wanted = typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else None
    numeric = {int: (numbers.Integral, "an integer"), float: (numbers.Real, "a number")}
    if wanted not in numeric:
        return
    abstract, words = numeric[wanted]
    if isinstance(value, bool) or not isinstance(value, abstract):
        raise ValueError(f"{name}={value!r} must be {words}")


def check_at_most(settings: Any, name: str, cap: str) -> None:
    """Checks that one field does not exceed another."""
    value, limit = getattr(settings, name), getattr(settings, cap)
    if value > limit:
        raise ValueError(f"{name}={value} must not exceed {cap}={limit}")
