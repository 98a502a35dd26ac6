"""Patterns in one command-line word, such as "vertical_slash,top_p=0.8"."""

import ast
from collections.abc import Mapping
from typing import Any

from mtraining_jax.patterns.base import Pattern
from mtraining_jax.patterns.registry import PATTERNS
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import options_of


def parse_pattern(text: str, others: Mapping[str, type[Pattern]] | None = None) -> Pattern:
    """Parses a pattern such as "vertical_slash,top_p=0.8".

    Args:
        text: the name of a pattern, or package.module:Class, followed by options ",name=value".
        others: additional patterns by name.

    Raises:
        UserError: if the pattern or an option is unknown, or a value is invalid.
    """
    name, options = split_options(text)
    kind: Any = (others or {}).get(name) or PATTERNS.get(name)
    fields = options_of(kind)
    for key, value in options.items():
        if key not in fields or not value:
            raise UserError(
                f'"{key}{"=" if value else ""}{value}" in "{text}" is not an option of {name}; '
                f"choose from {', '.join(fields)}, written as name=value"
            )
    try:
        return kind(**{key: _value(value) for key, value in options.items()})
    except ValueError as error:
        raise UserError(f'"{text}": {error}') from None


def split_options(text: str) -> tuple[str, dict[str, str]]:
    """Splits off the name; returns options as text, empty if an option has no value."""
    name, *options = text.split(",")
    pairs = (option.partition("=") for option in options)
    return name, {key: value for key, _, value in pairs}


def _value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
