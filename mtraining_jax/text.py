"""Plural forms."""


def counted(number: int, noun: str) -> str:
    """`1 file`, `2 files`, `3 processes`."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"
