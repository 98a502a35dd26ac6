"""Printing of text from files, models and other processes, which must not control a terminal."""

import contextlib
import re
import sys

# Control characters except newline and tab, and surrogates, which no encoding has.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Escapes control characters, except newlines and tabs, as Python does: ``\x1b``."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def print_message(text: str) -> None:
    """Prints a message to stderr, unless that is closed or on a full disk."""
    with contextlib.suppress(OSError):
        print(printable(text), file=sys.stderr, flush=True)
