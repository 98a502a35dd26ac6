"""Rules by which generated answers are scored, each from 0 to 1."""

import re

_CONTROL = re.compile(r"[\x00-\x1f]")


def cleaned(answer: str) -> str:
    """An answer without white space around it, and with control characters as line ends.

    RULER's `postprocess_pred`.
    """
    return _CONTROL.sub("\n", answer.strip()).strip()


def share_found(answer: str, references: tuple[str, ...]) -> float:
    """Share of the references that occur in the answer, in any case of letters.

    RULER's `string_match_all`, of all its tasks but question answering.
    """
    answer = cleaned(answer).lower()
    return sum(reference.lower() in answer for reference in references) / len(references)


def any_found(answer: str, references: tuple[str, ...]) -> float:
    """1 if any reference occurs in the answer, in any case of letters.

    RULER's `string_match_part`, of its question answering.
    """
    answer = cleaned(answer).lower()
    return float(any(reference.lower() in answer for reference in references))
