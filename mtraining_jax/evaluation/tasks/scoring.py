"""RULER's rules for scoring generated answers, from 0 to 1."""

import re
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")


def cleaned(answer: str) -> str:
    """Strips an answer, and turns control characters into line ends (`postprocess_pred`)."""
    return _CONTROL.sub("\n", answer.strip()).strip()


def share_found(answer: str, references: Sequence[object]) -> float:
    """Returns the fraction of the references that occur in the answer, ignoring case.

    RULER's `string_match_all`, for all its tasks except question answering.
    """
    answer = cleaned(answer).lower()
    return sum(str(each).lower() in answer for each in references) / len(references)


def any_found(answer: str, references: Sequence[object]) -> float:
    """Returns 1 if any reference occurs in the answer, ignoring case.

    RULER's `string_match_part`, for question answering.
    """
    answer = cleaned(answer).lower()
    return float(any(str(each).lower() in answer for each in references))
