"""Settings of a pattern in one word of a command line: its name, and options that differ."""

import ast
import dataclasses
from collections.abc import Mapping

from mtraining_jax.errors import UserError
from mtraining_jax.sparsity.pattern import Settings
from mtraining_jax.sparsity.registry import PATTERNS


def parse_settings(text: str, others: Mapping[str, type[Settings]] | None = None) -> Settings:
    """The settings that a text such as "vertical_slash,top_p=0.8" names.

    Args:
        text: the name of a pattern, or package.module:Name; then its options, each as
            ",name=value".
        others: patterns that are not registered, by name.

    Raises:
        UserError: if there is no such pattern or option, or a value is not allowed.
    """
    name, options = split_settings(text)
    kind: type[Settings] = (others or {}).get(name) or PATTERNS.get(name)
    fields = [field.name for field in dataclasses.fields(kind)]
    for key, value in options.items():
        if key not in fields or not value:
            raise UserError(
                f'"{key}{"=" if value else ""}{value}" in "{text}" is no option: those of {name} '
                f"are {', '.join(fields)}, each as name=value"
            )
    try:
        return kind(**{key: _value(value) for key, value in options.items()})
    except (ValueError, TypeError) as error:
        raise UserError(f'"{text}": {error}') from None


def split_settings(text: str) -> tuple[str, dict[str, str]]:
    """The name, and the options as text; an option without a value has an empty one."""
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
