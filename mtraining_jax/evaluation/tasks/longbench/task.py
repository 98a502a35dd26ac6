"""LongBench's 21 data sets, read from the published files."""

import functools
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from mtraining_jax.evaluation.tasks.longbench import rules
from mtraining_jax.evaluation.tasks.published import PublishedTask
from mtraining_jax.evaluation.tasks.task import Sample


class _Part(NamedTuple):
    new_tokens: int
    rule: rules.Rule


_PARTS = {
    "narrativeqa": _Part(128, rules.question),
    "qasper": _Part(128, rules.question),
    "multifieldqa_en": _Part(64, rules.question),
    "multifieldqa_zh": _Part(64, rules.chinese_question),
    "hotpotqa": _Part(32, rules.question),
    "2wikimqa": _Part(32, rules.question),
    "musique": _Part(32, rules.question),
    "dureader": _Part(128, rules.chinese_summary),
    "gov_report": _Part(512, rules.summary),
    "qmsum": _Part(512, rules.summary),
    "multi_news": _Part(512, rules.summary),
    "vcsum": _Part(512, rules.chinese_summary),
    "trec": _Part(64, rules.classification),
    "triviaqa": _Part(32, rules.question),
    "samsum": _Part(128, rules.summary),
    "lsht": _Part(64, rules.classification),
    "passage_count": _Part(32, rules.count),
    "passage_retrieval_en": _Part(32, rules.paragraph),
    "passage_retrieval_zh": _Part(32, rules.paragraph),
    "lcc": _Part(64, rules.code),
    "repobench-p": _Part(64, rules.code),
}
# Few-shot prompts: only the first line of an answer counts, the next line starts another example.
_FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")


@dataclass(frozen=True, kw_only=True)
class LongBench(PublishedTask):
    """Questions, summaries, few-shot examples and code over 5,000 to 15,000 words.

    Attributes:
        longbench: Folder with the files of LongBench, such as hotpotqa.jsonl.
    """

    family: ClassVar[str] = "longbench"
    needs: ClassVar[tuple[str, ...]] = ("longbench",)
    fields: ClassVar[tuple[str, ...]] = ("input", "context", "answers", "all_classes")

    longbench: str | None = None

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        needs_jieba = (rules.chinese_question, rules.chinese_summary)
        if _PARTS[self.part].rule in needs_jieba and not importlib.util.find_spec("jieba"):
            yield f'task "{self.name}" needs jieba to segment Chinese: pip install jieba'

    @property
    def new_tokens(self) -> int:
        return _PARTS[self.part].new_tokens

    def prompt(self, record: dict[str, Any]) -> str:
        return _templates()[self.part].format(context=record["context"], input=record["input"])

    def references(self, record: dict[str, Any]) -> tuple[str, ...]:
        return tuple(record["answers"])

    def score(self, sample: Sample, answer_text: str) -> float:
        """Scores an answer by the rule of this part, the maximum over the references."""
        if self.part in _FIRST_LINE:
            answer_text = answer_text.lstrip("\n").partition("\n")[0]
        classes = self.records()[sample.number]["all_classes"] or ()
        rule = _PARTS[self.part].rule
        references = map(str, sample.references)
        return max((rule(answer_text, each, classes) for each in references), default=0.0)


@functools.cache
def _templates() -> dict[str, str]:
    return json.loads((Path(__file__).parent / "templates.json").read_text(encoding="utf-8"))
