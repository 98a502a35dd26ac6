"""LongBench's 21 parts and LongBench v2 (Bai et al., 2023 and 2024), with their own rules."""

import functools
import re
from collections.abc import Sequence
from pathlib import Path

from mtraining_jax.tools.evaluate.tasks.metrics import (
    best,
    edit_similarity,
    fraction_of_numbers,
    normalized_chinese,
    overlap_f1,
    words_f1,
)
from mtraining_jax.tools.evaluate.tasks.published.rouge import rouge_l
from mtraining_jax.tools.evaluate.tasks.published.task import Part, PublishedTask
from mtraining_jax.tools.evaluate.tasks.records import Record
from mtraining_jax.tools.evaluate.tasks.task import Sample
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import options

try:  # only three of the data sets need it
    import jieba  # pyright: ignore[reportMissingImports]
except ImportError:
    jieba = None


def _chinese_words(text: str) -> list[str]:
    assert jieba is not None  # `LongBench.check`
    return jieba.lcut(text, cut_all=False)


def _chinese_words_f1(answer: str, reference: str) -> float:
    sides = (map(normalized_chinese, _chinese_words(text)) for text in (answer, reference))
    return overlap_f1(*([word for word in side if word] for side in sides))


def _chinese_rouge_l(answer: str, reference: str) -> float:
    return rouge_l(" ".join(_chinese_words(answer)), " ".join(_chinese_words(reference)))


def classification(answer: str, reference: str, classes: Sequence[str]) -> float:
    """Returns 1 over the number of classes that the answer names, if it names the right one."""
    # A name within the right one's name does not count. (The original implementation skips the
    # class after each one that it drops.)
    named = [x for x in classes if x in answer and (x == reference or x not in reference)]
    return 1 / len(named) if reference in named else 0.0


def _paragraph_number(answer: str, reference: str) -> float:
    """Returns the fraction of the answer's numbers that are the paragraph's number."""
    (number, *_) = re.findall(r"(?:Paragraph |段落)(\d+)", reference)
    return fraction_of_numbers(answer, number)


def _code_similarity(answer: str, reference: str) -> float:
    """Edit similarity of the answer's first line that is neither a comment nor a fence."""
    lines = answer.lstrip("\n").split("\n")
    code = (line for line in lines if not any(mark in line for mark in ("`", "#", "//")))
    return edit_similarity(next(code, ""), reference)


# Few-shot prompts: only the first line of an answer counts, the next line starts another example.
_FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")


@options(kw_only=True)
class LongBench(PublishedTask):
    """Questions, summaries, few-shot examples and code over 5,000 to 15,000 words."""

    family = "longbench"
    fields = ("input", "context", "answers", "all_classes")
    parts = {
        "narrativeqa": Part(128, words_f1),
        "qasper": Part(128, words_f1),
        "multifieldqa_en": Part(64, words_f1),
        "multifieldqa_zh": Part(64, _chinese_words_f1),
        "hotpotqa": Part(32, words_f1),
        "2wikimqa": Part(32, words_f1),
        "musique": Part(32, words_f1),
        "dureader": Part(128, _chinese_rouge_l),
        "gov_report": Part(512, rouge_l),
        "qmsum": Part(512, rouge_l),
        "multi_news": Part(512, rouge_l),
        "vcsum": Part(512, _chinese_rouge_l),
        "trec": Part(64, classification),
        "triviaqa": Part(32, words_f1),
        "samsum": Part(128, rouge_l),
        "lsht": Part(64, classification),
        "passage_count": Part(32, fraction_of_numbers),
        "passage_retrieval_en": Part(32, _paragraph_number),
        "passage_retrieval_zh": Part(32, _paragraph_number),
        "lcc": Part(64, _code_similarity),
        "repobench-p": Part(64, _code_similarity),
    }

    longbench: str | None = None
    """Folder with the files of LongBench, such as hotpotqa.jsonl."""

    def check(self) -> None:
        super().check()
        needs_jieba = self.parts[self.part].rule in (_chinese_words_f1, _chinese_rouge_l)
        if needs_jieba and jieba is None:
            raise UserError(f'task "{self.name}" needs jieba to segment Chinese: pip install jieba')

    def references(self, record: Record) -> tuple[str, ...]:
        return tuple(record["answers"])

    def score(self, sample: Sample, answer_text: str) -> float:
        if self.part in _FIRST_LINE:
            answer_text = answer_text.lstrip("\n").partition("\n")[0]
        rule = self.parts[self.part].rule
        if rule is classification:
            classes = self.records[sample.number]["all_classes"] or ()
            rule = functools.partial(classification, classes=classes)
        return best(rule, answer_text, map(str, sample.references))


def _right_letter(answer: str, letter: str) -> float:
    """Returns 1 if the letter follows "The correct answer is", with or without parentheses."""
    answer = answer.replace("*", "")
    found = re.search(r"The correct answer is \(([A-D])\)", answer)
    found = found or re.search("The correct answer is ([A-D])", answer)
    return float(found is not None and found.group(1) == letter)


_V2_SHOWN = ("context", "question", "choice_A", "choice_B", "choice_C", "choice_D")


@options(kw_only=True)
class LongBenchV2(PublishedTask):
    """Multiple-choice questions with four options about texts of 8,000 to 2 million words."""

    family = "longbench_v2"
    fields = (*_V2_SHOWN, "answer")
    parts = {"longbench_v2": Part(128, _right_letter)}

    longbench_v2: str | None = None
    """The file of LongBench v2, data.json."""

    @property
    def path(self) -> Path:
        return Path(self.longbench_v2 or "").expanduser()

    def prompt(self, record: Record) -> str:
        return self.template.format(**{field: record[field].strip() for field in _V2_SHOWN})

    def references(self, record: Record) -> tuple[str, ...]:
        return (record["answer"],)
