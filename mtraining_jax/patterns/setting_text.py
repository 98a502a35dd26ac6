"""Pattern settings in one command-line word: the name and options that differ from defaults."""

import ast
import dataclasses
from collections.abc import Mapping
from typing import Any

from mtraining_jax.patterns.base import Settings
from mtraining_jax.patterns.registry import PATTERNS
from mtraining_jax.utils.errors import UserError


def parse_settings(text: str, others: Mapping[str, type[Settings]] | None = None) -> Settings:
    """Parses settings such as "vertical_slash,top_p=0.8".

    Args:
        text: the name of a pattern, or package.module:Class, followed by options ",name=value".
        others: additional patterns by name.

    Raises:
        UserError: if the pattern or an option is unknown, or a value is invalid.
    """
    name, options = split_settings(text)
    kind: Any = (others or {}).get(name) or PATTERNS.get(name)
    fields = [field.name for field in dataclasses.fields(kind)]
    for key, value in options.items():
        if key not in fields or not value:
            raise UserError(
                f'"{key}{"=" if value else ""}{value}" in "{text}" is not an option of {name}; '
                f"choose from {', '.join(fields)}, written as name=value"
            )
    try:
        return kind(**{key: _value(value) for key, value in options.items()})
    except (ValueError, TypeError) as error:
        raise UserError(f'"{text}": {error}') from None


def split_settings(text: str) -> tuple[str, dict[str, str]]:
    """Splits off the name; returns options as text, empty if an option has no value."""
    name, *given = text.split(",")
    options = {}
    for option in given:
        key, _, value = option.partition("=")
        options[key] = value
    return name, options


def _value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
