"""InfiniteBench's twelve parts, read from the published files."""

import re
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from mtraining_jax.evaluation.tasks.metrics import best, characters_f1, words_f1
from mtraining_jax.evaluation.tasks.published import infinitebench_rules as rules
from mtraining_jax.evaluation.tasks.published.rouge import rouge_l_sum
from mtraining_jax.evaluation.tasks.published.task import Part, PublishedTask, Record
from mtraining_jax.evaluation.tasks.task import Sample
from mtraining_jax.utils.errors import UserError

_MULTIPLE_CHOICE = ("longbook_choice_eng", "code_debug")


@dataclass(frozen=True, kw_only=True)
class InfiniteBench(PublishedTask):
    """Retrieval, questions, summaries, code and arithmetic over 40,000 to 2 million tokens.

    Attributes:
        infinitebench: Folder with the files of InfiniteBench, such as passkey.jsonl.
    """

    family: ClassVar[str] = "infinitebench"
    needs: ClassVar[tuple[str, ...]] = ("infinitebench",)
    fields: ClassVar[tuple[str, ...]] = ("context", "input", "answer", "options")
    parts = {
        "passkey": Part(6, rules.first_number_is),
        "number_string": Part(12, rules.first_number_is),
        "kv_retrieval": Part(50, rules.word_is_in),
        "longdialogue_qa_eng": Part(40, rules.name_is_in),
        "longbook_sum_eng": Part(1200, partial(best, rouge_l_sum)),
        "longbook_choice_eng": Part(40, rules.choice_is),
        "longbook_qa_eng": Part(40, partial(best, words_f1)),
        "longbook_qa_chn": Part(40, partial(best, characters_f1)),
        "math_find": Part(3, rules.number_is),
        "math_calc": Part(30_000, rules.right_numbers_first),
        "code_run": Part(5, rules.last_word_is),
        "code_debug": Part(5, rules.function_is),
    }

    infinitebench: str | None = None

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
        return self.template().format(**record | fields)

    def references(self, record: Record) -> tuple[str, ...]:
        return tuple(map(str, self._label(record)))

    def score(self, sample: Sample, answer_text: str) -> float:
        label = self._label(self.records()[sample.number])
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
        raise UserError(f'infinitebench: {self.path}: the answer "{label[0]}" is not an option')

    def _options(self, record: Record) -> dict[str, str]:
        options = record["options"]
        if len(options) != 4:
            raise UserError(
                f"infinitebench: {self.path}: a record has {len(options)} options; it must have 4"
            )
        return dict(zip("ABCD", options, strict=True))

    def _find(self, pattern: str, record: Record) -> str:
        found = re.search(pattern, record["input"])
        if found is None:
            raise UserError(
                f'infinitebench: {self.path}: the input "{record["input"][:80]}" has no "{pattern}"'
            )
        return found.group()
