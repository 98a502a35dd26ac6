"""ROUGE-L of summaries (Lin, 2004, section 3.2), in the two variants of published data sets."""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np


def rouge_l(answer: str, reference: str) -> float:
    """F1 as in the package rouge 1.0.1, which LongBench uses.

    Sentences end at a full stop. It compares sets of distinct words: the union of the longest
    common subsequences of all pairs of sentences, and the words of both texts.
    """
    # White space between two stops is a sentence of one empty word.
    answers, references = (
        [part.split() or [""] for part in text.split(".") if part] for text in (answer, reference)
    )
    if not answers or not references:
        return 0.0
    union = {
        wanted[i]
        for wanted in references
        for said in answers
        for i in _common_places(wanted, said, earlier_in_first=False)
    }
    said_words, wanted_words = (
        {word for sentence in side for word in sentence} for side in (answers, references)
    )
    precision, recall = len(union) / len(said_words), len(union) / len(wanted_words)
    return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_l_sum(answer: str, reference: str) -> float:
    """F1 as in rouge-score 0.1.2 ("rougeLsum", no stemmer), which InfiniteBench uses.

    Sentences are lines, and words are runs of lower-case letters and digits. A word in the union of
    the longest common subsequences counts as often as both texts have it.
    """
    answers, references = (
        [re.findall("[a-z0-9]+", line.lower()) for line in text.split("\n") if line]
        for text in (answer, reference)
    )
    left, wanted_left = (
        Counter(word for line in side for word in line) for side in (answers, references)
    )
    sizes = left.total(), wanted_left.total()
    if not all(sizes):
        return 0.0
    hits = 0
    for wanted in references:
        pairs = (_common_places(wanted, said, earlier_in_first=True) for said in answers)
        for word in (wanted[place] for place in set().union(*pairs)):
            if left[word] > 0 and wanted_left[word] > 0:
                hits += 1
                left[word] -= 1
                wanted_left[word] -= 1
    return 2 * hits / sum(sizes)


def _common_places(
    first: Sequence[str], second: Sequence[str], *, earlier_in_first: bool
) -> list[int]:
    """Returns positions in the first text of a longest common subsequence with the second.

    `earlier_in_first`: in which text to step back where a step in either keeps the length.
    """
    ids = {word: i for i, word in enumerate({*first, *second})}
    a, b = (np.array([ids[word] for word in text], np.int64) for text in (first, second))
    # lengths[i, j]: length of the longest common subsequence of first[:i] and second[:j].
    lengths = np.zeros((a.size + 1, b.size + 1), np.int32)
    for i in range(1, a.size + 1):
        matched = np.where(b == a[i - 1], lengths[i - 1, :-1] + 1, lengths[i - 1, 1:])
        lengths[i, 1:] = np.maximum.accumulate(matched)
    places = []
    i, j = a.size, b.size
    while i > 0 and j > 0:
        up, left = lengths[i - 1, j], lengths[i, j - 1]
        if a[i - 1] == b[j - 1]:
            i, j = i - 1, j - 1
            places.append(i)
        elif up > left or (up == left and earlier_in_first):
            i -= 1
        else:
            j -= 1
    return places
