"""InfiniteBench's twelve parts, read from the published files."""

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from mtraining_jax.evaluation.tasks.infinitebench import rules
from mtraining_jax.evaluation.tasks.published import PublishedTask
from mtraining_jax.evaluation.tasks.task import Sample
from mtraining_jax.utils.errors import UserError


class _Part(NamedTuple):
    new_tokens: int
    rule: rules.Rule


_PARTS = {
    "passkey": _Part(6, rules.first_number_is),
    "number_string": _Part(12, rules.first_number_is),
    "kv_retrieval": _Part(50, rules.word_is_in),
    "longbook_sum_eng": _Part(1200, rules.summary_overlap),
    "longbook_choice_eng": _Part(40, rules.choice_is),
    "longbook_qa_eng": _Part(40, rules.best_words_f1),
    "longbook_qa_chn": _Part(40, rules.best_characters_f1),
    "longdialogue_qa_eng": _Part(40, rules.name_is_in),
    "math_find": _Part(3, rules.number_is),
    "math_calc": _Part(30_000, rules.right_numbers_first),
    "code_run": _Part(5, rules.last_word_is),
    "code_debug": _Part(5, rules.function_is),
}
_OF_OPTIONS = ("longbook_choice_eng", "code_debug")


@dataclass(frozen=True, kw_only=True)
class InfiniteBench(PublishedTask):
    """Retrieval, questions, summaries, code and arithmetic over 40,000 to 2 million tokens.

    Attributes:
        infinitebench: Folder with the files of InfiniteBench, such as passkey.jsonl.
    """

    family: ClassVar[str] = "infinitebench"
    needs: ClassVar[tuple[str, ...]] = ("infinitebench",)
    fields: ClassVar[tuple[str, ...]] = ("context", "input", "answer", "options")

    infinitebench: str | None = None

    @property
    def new_tokens(self) -> int:
        return _PARTS[self.part].new_tokens

    def prompt(self, record: dict[str, Any]) -> str:
        fields = {"context": record["context"], "input": record["input"]}
        if self.part == "code_run":
            fields["func_call"] = self._found(r"func_[0-9]+\(-?[0-9]+\)", record)
            fields["func"] = fields["func_call"].partition("(")[0]
        elif self.part == "math_find":
            wanted = self._found("The .+ of", record).lower().removesuffix(" of")
            fields["prefix"] = f"What is {wanted} in the following list?"
        elif self.part.startswith("longbook"):
            fields["question"] = record["input"]
        if self.part in _OF_OPTIONS:
            fields |= {f"OPTION_{letter}": text for letter, text in self._options(record).items()}
        return _templates()[self.part].format(**fields)

    def references(self, record: dict[str, Any]) -> tuple[str, ...]:
        label = self._label(record)
        return tuple(map(str, label)) if isinstance(label, list) else (str(label),)

    def score(self, sample: Sample, answer_text: str) -> float:
        label = self._label(self.records()[sample.number])
        return _PARTS[self.part].rule(answer_text, label)

    def _label(self, record: dict[str, Any]) -> Any:
        """Returns the published answer; for multiple choice, its text and its letter."""
        answer = record["answer"]
        if self.part not in _OF_OPTIONS:
            return answer
        if isinstance(answer, list) and len(answer) == 2:
            return answer
        text = answer[0] if isinstance(answer, list) else answer
        for letter, option in self._options(record).items():
            if option == text:
                return [text, letter]
        raise UserError(f'infinitebench: {self.path}: the answer "{text}" is not an option')

    def _options(self, record: dict[str, Any]) -> dict[str, str]:
        options = record["options"]
        if len(options) != 4:
            raise UserError(
                f"infinitebench: {self.path}: a record has {len(options)} options; it must have 4"
            )
        return dict(zip("ABCD", options, strict=True))

    def _found(self, pattern: str, record: dict[str, Any]) -> str:
        found = re.search(pattern, record["input"])
        if found is None:
            raise UserError(
                f'infinitebench: {self.path}: the input "{record["input"][:80]}" has no "{pattern}"'
            )
        return found.group()


@functools.cache
def _templates() -> dict[str, str]:
    return json.loads((Path(__file__).parent / "templates.json").read_text(encoding="utf-8"))
