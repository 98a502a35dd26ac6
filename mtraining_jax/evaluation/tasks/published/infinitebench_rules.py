"""InfiniteBench's scoring rules (src/compute_scores.py): from an answer and its labels to a score.

Labels are the published answers; for multiple choice, the text of the answer and its letter.
"""

import re
from collections.abc import Sequence
from typing import Any

_MARKS = "\n:\"'.,?!{}"


def _spaced(answer: str, marks: str) -> str:
    return answer.translate(str.maketrans(dict.fromkeys(marks, " ")))


def first_number_is(answer: str, labels: Sequence[str]) -> float:
    """Returns 1 if the first run of digits is the label."""
    found = re.search("[0-9]+", answer)
    return float(found is not None and found.group() == str(labels[0]))


def word_is_in(answer: str, labels: Sequence[str]) -> float:
    """Returns 1 if the label is a word of the answer."""
    return float(labels[0] in _spaced(answer, _MARKS).split())


def name_is_in(answer: str, labels: Sequence[str]) -> float:
    """Returns 1 if the first name of the labels, in capitals, is a word of the answer."""
    return float(labels[0] in _spaced(answer, _MARKS).upper().split())


def last_word_is(answer: str, labels: Sequence[int]) -> float:
    """Returns 1 if the last word is the label, an integer."""
    said = _spaced(answer.strip(), "\n.`'\":").split()
    try:
        return float(int(said[-1]) == int(labels[0]))
    except (IndexError, ValueError):
        return 0.0


def number_is(answer: str, labels: Sequence[float]) -> float:
    """Returns 1 if the first number is the label, an integer or a decimal fraction."""
    found = re.search(r"\d+\.\d+|\d+", answer)
    if found is None or (isinstance(labels[0], int) and "." in found.group()):
        return 0.0
    return float(float(found.group()) == labels[0])


def right_numbers_first(answer: str, labels: Sequence[Any]) -> float:
    """Returns the fraction of the label's numbers that the answer starts with, in order."""
    wanted = labels[0] if isinstance(labels[0], list) else labels
    said = [int(number) for number in re.findall("[0-9]+", answer)]
    right = 0
    while right < min(len(said), len(wanted)) and said[right] == wanted[right]:
        right += 1
    return right / len(wanted)


def function_is(answer: str, labels: Sequence[str]) -> float:
    """Returns 1 if the answer starts with the letter, or has it or the name after "is:"."""
    answer = answer.strip()
    if answer[:2] in (f"{labels[1]}.", f"{labels[1]}:"):
        return 1.0
    answer = re.sub("[\n`'\"\\-*]|[Oo]ption", " ", answer)
    prefixes = ("answer is:", "is:", "answer:", "correct option is:")
    return _after_prefix(re.sub(" +", " ", answer), prefixes, labels) or 0.0


def choice_is(answer: str, labels: Sequence[str]) -> float:
    """Returns 1 if the letter is right: at the start, after "answer is" etc., or as first word."""
    answer = answer.strip()
    if not answer:
        return 0.0
    if answer[0] in "ABCD":
        return float(answer[0] in labels)
    if answer in labels:
        return 1.0
    answer = re.sub(" +", " ", _spaced(answer, "\n\"'.,?!{}"))
    found = _after_prefix(answer, ("answer is:", "answer:", "answer is", "option is"), labels)
    if found is not None:
        return found
    letters = [word for word in answer.split() if word in "ABCD"]
    return float(bool(letters) and letters[0] in labels)


def _after_prefix(answer: str, prefixes: Sequence[str], labels: Sequence[str]) -> float | None:
    """Whether a label follows the first prefix that occurs; None without a prefix."""
    for prefix in prefixes:
        _, found, rest = answer.partition(prefix)
        if found:
            # Skips the space after the prefix.
            return float(rest[1:].startswith(tuple(labels)))
    return None
