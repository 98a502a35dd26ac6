"""LongBench v2: multiple-choice questions about very long texts."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mtraining_jax.evaluation.tasks.published import PublishedTask
from mtraining_jax.evaluation.tasks.task import Sample

# prompts/0shot.txt of THUDM/LongBench (MIT license).
_TEMPLATE = (
    "Please read the following text and answer the question below.\n\n<text>\n{context}\n</text>"
    "\n\nWhat is the correct answer to this question: {question}\nChoices:\n(A) {choice_A}\n"
    "(B) {choice_B}\n(C) {choice_C}\n(D) {choice_D}\n\n"
    'Format your response as follows: "The correct answer is (insert answer here)".'
)
_SHOWN = ("context", "question", "choice_A", "choice_B", "choice_C", "choice_D")


@dataclass(frozen=True, kw_only=True)
class LongBenchV2(PublishedTask):
    """Multiple-choice questions with four options about texts of 8,000 to 2 million words.

    Attributes:
        longbench_v2: The file of LongBench v2, data.json.
    """

    family: ClassVar[str] = "longbench_v2"
    needs: ClassVar[tuple[str, ...]] = ("longbench_v2",)
    fields: ClassVar[tuple[str, ...]] = (*_SHOWN, "answer")
    new_tokens: ClassVar[int] = 128

    longbench_v2: str | None = None

    @property
    def path(self) -> Path:
        return Path(self.longbench_v2 or "").expanduser()

    def prompt(self, record: dict[str, Any]) -> str:
        return _TEMPLATE.format(**{field: record[field].strip() for field in _SHOWN})

    def references(self, record: dict[str, Any]) -> tuple[str, ...]:
        return (record["answer"],)

    def score(self, sample: Sample, answer_text: str) -> float:
        """Returns 1 if the letter follows "The correct answer is", with or without parentheses."""
        answer = answer_text.replace("*", "")
        for pattern in (r"The correct answer is \(([A-D])\)", "The correct answer is ([A-D])"):
            found = re.search(pattern, answer)
            if found:
                return float(found.group(1) == sample.references[0])
        return 0.0
