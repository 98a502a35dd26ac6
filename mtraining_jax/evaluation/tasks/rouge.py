"""ROUGE-L of summaries (Lin, 2004, section 3.2), in the two variants of published data sets."""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np


def rouge_l(answer: str, reference: str) -> float:
    """F1 as in the package rouge 1.0.1, which LongBench uses.

    Sentences end at a full stop. It compares sets of distinct words: the union of the longest
    common subsequences of all pairs of sentences, and the words of both texts.

    Returns:
        0 if either text has no sentence.
    """
    answers, references = _sentences_by_stop(answer), _sentences_by_stop(reference)
    if not answers or not references:
        return 0.0
    union: set[str] = set()
    for wanted in references:
        for said in answers:
            union |= {wanted[i] for i in _common_places(wanted, said, earlier_in_first=False)}
    sizes = [
        len({word for sentence in side for word in sentence}) for side in (answers, references)
    ]
    precision, recall = len(union) / sizes[0], len(union) / sizes[1]
    return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_l_sum(answer: str, reference: str) -> float:
    """F1 as in rouge-score 0.1.2 ("rougeLsum", no stemmer), which InfiniteBench uses.

    Sentences are lines, and words are runs of lower-case letters and digits. A word in the union of
    the longest common subsequences counts as often as both texts have it.
    """
    answers, references = _lines(answer), _lines(reference)
    left = [Counter(word for line in side for word in line) for side in (answers, references)]
    sizes = [counts.total() for counts in left]
    if not all(sizes):
        return 0.0
    hits = 0
    for wanted in references:
        places = {
            place
            for said in answers
            for place in _common_places(wanted, said, earlier_in_first=True)
        }
        for place in sorted(places):
            word = wanted[place]
            if all(counts[word] > 0 for counts in left):
                hits += 1
                for counts in left:
                    counts[word] -= 1
    return 2 * hits / sum(sizes)


def _sentences_by_stop(text: str) -> list[list[str]]:
    # White space between two stops is a sentence of one empty word.
    return [part.split() or [""] for part in text.split(".") if part]


def _lines(text: str) -> list[list[str]]:
    return [re.findall("[a-z0-9]+", line.lower()) for line in text.split("\n") if line]


def _common_places(
    first: Sequence[str], second: Sequence[str], *, earlier_in_first: bool
) -> list[int]:
    """Returns positions in the first text of a longest common subsequence with the second.

    Args:
        first, second: words.
        earlier_in_first: tie-breaking: where a step back in either text keeps the length, whether
            to step back in the first one.
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
        if a[i - 1] == b[j - 1]:
            i, j = i - 1, j - 1
            places.append(i)
            continue
        up, left = lengths[i - 1, j], lengths[i, j - 1]
        if up > left or (up == left and earlier_in_first):
            i -= 1
        else:
            j -= 1
    return places[::-1]
