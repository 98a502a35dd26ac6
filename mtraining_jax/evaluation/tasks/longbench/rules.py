"""LongBench's scoring rules: from an answer, a reference and all classes to a score of 0 to 1."""

import re
from collections.abc import Callable, Sequence

from mtraining_jax.evaluation.tasks.metrics import (
    chinese_normalised,
    edit_similarity,
    overlap_f1,
    share_of_numbers,
    words_f1,
)
from mtraining_jax.evaluation.tasks.rouge import rouge_l

Rule = Callable[[str, str, Sequence[str]], float]


def question(answer: str, reference: str, classes: Sequence[str]) -> float:
    """F1 of English words."""
    return words_f1(answer, reference)


def summary(answer: str, reference: str, classes: Sequence[str]) -> float:
    """ROUGE-L."""
    return rouge_l(answer, reference)


def chinese_question(answer: str, reference: str, classes: Sequence[str]) -> float:
    """F1 of Chinese words, segmented by jieba."""
    sides = [[chinese_normalised(word) for word in _cut(text)] for text in (answer, reference)]
    return overlap_f1(*([word for word in side if word] for side in sides))


def chinese_summary(answer: str, reference: str, classes: Sequence[str]) -> float:
    """ROUGE-L of Chinese words, segmented by jieba."""
    return rouge_l(" ".join(_cut(answer)), " ".join(_cut(reference)))


def classification(answer: str, reference: str, classes: Sequence[str]) -> float:
    """Returns 1 over the number of classes that the answer names, if it names the right one.

    Classes with a name that is part of the right one's name do not count. (The original
    implementation skips the class after each one that it drops.)
    """
    named = [
        each for each in classes if each in answer and (each == reference or each not in reference)
    ]
    return 1 / len(named) if reference in named else 0.0


def count(answer: str, reference: str, classes: Sequence[str]) -> float:
    """Returns the fraction of the answer's numbers that are right."""
    return share_of_numbers(answer, reference)


def paragraph(answer: str, reference: str, classes: Sequence[str]) -> float:
    """Returns the fraction of the answer's numbers that are the paragraph's number."""
    return share_of_numbers(answer, re.findall(r"(?:Paragraph |段落)(\d+)", reference)[0])


def code(answer: str, reference: str, classes: Sequence[str]) -> float:
    """Edit similarity of the answer's first line that is neither a comment nor a fence."""
    for line in answer.lstrip("\n").split("\n"):
        if not any(mark in line for mark in ("`", "#", "//")):
            return edit_similarity(line, reference)
    return edit_similarity("", reference)


def _cut(text: str) -> list[str]:
    # Optional dependency: three of the 21 sets need it.
    import jieba  # pyright: ignore[reportMissingImports]

    return jieba.lcut(text, cut_all=False)
