"""InfiniteBench's scoring rules: from an answer and a published label to a score from 0 to 1."""

import re
from collections.abc import Callable
from typing import Any

from mtraining_jax.evaluation.tasks.metrics import best, characters_f1, first_number, words_f1
from mtraining_jax.evaluation.tasks.rouge import rouge_l_sum

Rule = Callable[[str, Any], float]


def _listed(label: Any) -> list[Any]:
    return label if isinstance(label, list) else [label]


def _spaced(answer: str, marks: str) -> str:
    return answer.translate(str.maketrans(dict.fromkeys(marks, " ")))


def first_number_is(answer: str, label: Any) -> float:
    """Returns 1 if the first run of digits is the label."""
    return float(first_number(answer) == str(_listed(label)[0]))


def word_is_in(answer: str, label: Any) -> float:
    """Returns 1 if the label is a word of the answer."""
    return float(_listed(label)[0] in _spaced(answer, "\n:\"'.,?!{}").split())


def name_is_in(answer: str, label: Any) -> float:
    """Returns 1 if the first name of the label, in capitals, is a word of the answer (any case)."""
    return float(_listed(label)[0] in _spaced(answer, "\n:\"'.,?!{}").upper().split())


def last_word_is(answer: str, label: Any) -> float:
    """Returns 1 if the last word is the label, an integer."""
    said = _spaced(answer.strip(), "\n.`'\":").split()
    try:
        return float(int(said[-1]) == int(_listed(label)[0]))
    except (IndexError, ValueError):
        return 0.0


def number_is(answer: str, label: Any) -> float:
    """Returns 1 if the first number is the label, an integer or a decimal fraction."""
    found = re.search(r"\d+\.\d+|\d+", answer)
    wanted = _listed(label)[0]
    if found is None or (isinstance(wanted, int) and "." in found.group()):
        return 0.0
    return float(float(found.group()) == wanted)


def right_numbers_first(answer: str, label: Any) -> float:
    """Returns the fraction of the label's numbers that the answer starts with, in order."""
    wanted = label[0] if isinstance(label[0], list) else label
    said = [int(number) for number in re.findall("[0-9]+", answer)]
    right = 0
    for a, b in zip(said, wanted, strict=False):
        if a != b:
            break
        right += 1
    return right / len(wanted)


def function_is(answer: str, label: Any) -> float:
    """Returns 1 if the answer starts with the label's letter, or has it or the name after "is:"."""
    name, letter = label
    answer = answer.strip()
    if answer[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    for mark in ("\n", "`", "'", '"', "-", "*", "Option", "option"):
        answer = answer.replace(mark, " ")
    answer = re.sub(" +", " ", answer)
    return (
        _after_prefix(answer, ("answer is:", "is:", "answer:", "correct option is:"), label) or 0.0
    )


def choice_is(answer: str, label: Any) -> float:
    """Returns 1 if the letter is right: at the start, after "answer is" etc., or as first word."""
    answer = answer.strip()
    if not answer:
        return 0.0
    if answer[0] in "ABCD":
        return float(answer[0] in label)
    if answer in label:
        return 1.0
    answer = re.sub(" +", " ", _spaced(answer, "\n\"'.,?!{}"))
    found = _after_prefix(answer, ("answer is:", "answer:", "answer is", "option is"), label)
    if found is not None:
        return found
    letters = [word for word in answer.split() if word in "ABCD"]
    return float(bool(letters) and letters[0] in label)


def _after_prefix(answer: str, prefixes: tuple[str, ...], wanted: list[str]) -> float | None:
    """Whether a wanted text follows the first prefix that occurs; None without a prefix."""
    for prefix in prefixes:
        _, found, rest = answer.partition(prefix)
        if found:
            # Skips the space after the prefix.
            return float(any(rest[1:].startswith(each) for each in wanted))
    return None


def summary_overlap(answer: str, label: Any) -> float:
    """rougeLsum, the maximum over the labels."""
    return best(rouge_l_sum, answer, _listed(label))


def best_words_f1(answer: str, label: Any) -> float:
    """F1 of English words, the maximum over the labels."""
    return best(words_f1, answer, _listed(label))


def best_characters_f1(answer: str, label: Any) -> float:
    """F1 of Chinese characters, the maximum over the labels."""
    return best(characters_f1, answer, _listed(label))
