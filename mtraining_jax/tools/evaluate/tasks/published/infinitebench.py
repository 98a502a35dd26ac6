"""InfiniteBench's twelve parts (Zhang et al., 2024), with the rules of its compute_scores.py.

Labels are the published answers; for multiple choice, the text of the answer and its letter.
"""

import itertools
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from mtraining_jax.tools.evaluate.tasks.metrics import best, characters_f1, words_f1
from mtraining_jax.tools.evaluate.tasks.published.rouge import rouge_l_sum
from mtraining_jax.tools.evaluate.tasks.published.task import Part, PublishedTask
from mtraining_jax.tools.evaluate.tasks.records import Record
from mtraining_jax.tools.evaluate.tasks.task import Sample
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import options

_MARKS = "\n:\"'.,?!{}"


def _spaced(answer: str, marks: str) -> str:
    return answer.translate(str.maketrans(dict.fromkeys(marks, " ")))


def _first_number_is(answer: str, labels: Sequence[str]) -> float:
    found = re.search("[0-9]+", answer)
    return float(found is not None and found.group() == str(labels[0]))


def _word_is_in(answer: str, labels: Sequence[str]) -> float:
    return float(labels[0] in _spaced(answer, _MARKS).split())


def _name_is_in(answer: str, labels: Sequence[str]) -> float:
    """Returns 1 if the first name of the labels, in capitals, is a word of the answer."""
    return float(labels[0] in _spaced(answer, _MARKS).upper().split())


def _last_word_is(answer: str, labels: Sequence[int]) -> float:
    """Returns 1 if the last word is the label, an integer."""
    said = _spaced(answer.strip(), "\n.`'\":").split()
    try:
        return float(int(said[-1]) == int(labels[0]))
    except (IndexError, ValueError):
        return 0.0


def _number_is(answer: str, labels: Sequence[float]) -> float:
    """Returns 1 if the first number is the label, an integer or a decimal fraction."""
    found = re.search(r"\d+\.\d+|\d+", answer)
    if found is None or (isinstance(labels[0], int) and "." in found.group()):
        return 0.0
    return float(float(found.group()) == labels[0])


def _right_numbers_first(answer: str, labels: Sequence[Any]) -> float:
    """Returns the fraction of the label's numbers that the answer starts with, in order."""
    wanted = labels[0] if isinstance(labels[0], list) else labels
    # As text, since Python does not read integers of thousands of digits.
    said = (digits.lstrip("0") or "0" for digits in re.findall("[0-9]+", answer))
    pairs = zip(said, map(str, wanted), strict=False)
    right = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
    return len(list(right)) / len(wanted)


def _function_is(answer: str, labels: Sequence[str]) -> float:
    """Returns 1 if the answer starts with the letter, or has it or the name after "is:"."""
    answer = answer.strip()
    if answer[:2] in (f"{labels[1]}.", f"{labels[1]}:"):
        return 1.0
    answer = re.sub("[\n`'\"\\-*]|[Oo]ption", " ", answer)
    prefixes = ("answer is:", "is:", "answer:", "correct option is:")
    return _after_prefix(re.sub(" +", " ", answer), prefixes, labels) or 0.0


def _choice_is(answer: str, labels: Sequence[str]) -> float:
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


_MULTIPLE_CHOICE = ("longbook_choice_eng", "code_debug")


@options(kw_only=True)
class InfiniteBench(PublishedTask):
    """Retrieval, questions, summaries, code and arithmetic over 40,000 to 2 million tokens."""

    family = "infinitebench"
    fields = ("context", "input", "answer", "options")
    parts = {
        "passkey": Part(6, _first_number_is),
        "number_string": Part(12, _first_number_is),
        "kv_retrieval": Part(50, _word_is_in),
        "longdialogue_qa_eng": Part(40, _name_is_in),
        "longbook_sum_eng": Part(1200, partial(best, rouge_l_sum)),
        "longbook_choice_eng": Part(40, _choice_is),
        "longbook_qa_eng": Part(40, partial(best, words_f1)),
        "longbook_qa_chn": Part(40, partial(best, characters_f1)),
        "math_find": Part(3, _number_is),
        "math_calc": Part(30_000, _right_numbers_first),
        "code_run": Part(5, _last_word_is),
        "code_debug": Part(5, _function_is),
    }

    infinitebench: str | None = None
    """Folder with the files of InfiniteBench, such as passkey.jsonl."""

    def prompt(self, record: Record) -> str:
        fields = {"question": record["input"]}
        if self.part == "code_run":
            fields["func_call"] = self._find(r"func_[0-9]+\(-?[0-9]+\)", record)
            fields["func"] = fields["func_call"].partition("(")[0]
        elif self.part == "math_find":
            wanted = self._find("The .+ of", record).lower().removesuffix(" of")
            fields["prefix"] = f"What is {wanted} in the following list?"
        elif self.part in _MULTIPLE_CHOICE:
            fields |= {f"OPTION_{letter}": text for letter, text in self._options(record).items()}
        return self.template.format(**record | fields)

    def references(self, record: Record) -> tuple[str, ...]:
        return tuple(map(str, self._label(record)))

    def score(self, sample: Sample, answer_text: str) -> float:
        label = self._label(self.records[sample.number])
        return self.parts[self.part].rule(answer_text, label)

    def _label(self, record: Record) -> list[Any]:
        """Returns the published answers; for multiple choice, the text and letter of the one."""
        answer = record["answer"]
        label = answer if isinstance(answer, list) else [answer]
        if self.part not in _MULTIPLE_CHOICE or len(label) == 2:
            return label
        for letter, option in self._options(record).items():
            if option == label[0]:
                return [option, letter]
        raise self._malformed(f'the answer "{label[0]}" is not an option')

    def _options(self, record: Record) -> dict[str, str]:
        options = record["options"]
        if len(options) != 4:
            raise self._malformed(f"a record has {len(options)} options; it must have 4")
        return dict(zip("ABCD", options, strict=True))

    def _find(self, pattern: str, record: Record) -> str:
        found = re.search(pattern, record["input"])
        if found is None:
            raise self._malformed(f'the input "{record["input"][:80]}" has no "{pattern}"')
        return found.group()

    def _malformed(self, what: str) -> UserError:
        return UserError(f"infinitebench: {self.path}: {what}")
