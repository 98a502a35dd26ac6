"""RULER's question answering (scripts/data/synthetic/qa.py), from the published files.

`ruler_qa_1` reads SQuAD 2.0 (dev-v2.0.json), `ruler_qa_2` HotpotQA
(hotpot_dev_distractor_v1.json).
"""

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mtraining_jax.data.tokenizer import Tokenizer
from mtraining_jax.evaluation.tasks.ruler.base import RulerTask
from mtraining_jax.evaluation.tasks.scoring import any_found
from mtraining_jax.evaluation.tasks.sized import Draft
from mtraining_jax.evaluation.tasks.task import Sample
from mtraining_jax.utils.errors import UserError

_INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words."
)


@dataclass(frozen=True)
class Question:
    """One question with its accepted answers.

    Attributes:
        needed: indices of the documents that it is about.
        near: indices of documents of the same article, the strongest distractors.
    """

    text: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class QuestionAnswering(RulerTask):
    """Answers a question from one or several of many documents."""

    max_new_tokens: ClassVar[int] = 32

    @property
    def path(self) -> str:
        return getattr(self, self.needs[0])

    def data(self) -> tuple[list[Question], list[str]]:
        raise NotImplementedError(f"{type(self).__name__}.data")

    def problems(self) -> Iterator[str]:
        missing = list(super().problems())
        yield from missing
        if not missing and not self.data()[0]:
            yield f'{self.needs[0]}: "{self.path}" has no answerable question'

    def count(self, tokenizer: Tokenizer | None, length: int | None = None) -> int:
        return len(self.data()[0])

    def build(self, size: int, length: int, number: int, seed: int) -> Draft:
        """Builds a draft; a piece is a document."""
        questions, documents = self.data()
        question = questions[max(number, 0)]
        stream = self.stream(length, number, seed)
        if size < len(documents):
            shown = list(question.needed)
            free = [i for i in question.near if i not in question.needed]
            wanted = max(0, size - len(shown))
            if wanted > len(free):
                taken = {*shown, *free}
                others = [i for i in range(len(documents)) if i not in taken]
                drawn = stream.sample(len(others), min(wanted - len(free), len(others)))
                shown += free + [others[i] for i in drawn]
            else:
                shown += [free[i] for i in stream.sample(len(free), wanted)]
        else:
            shown = [i % len(documents) for i in range(size)]
        context = "\n\n".join(
            f"Document {place}:\n{documents[shown[i]]}"
            for place, i in enumerate(stream.order(len(shown)), 1)
        )
        return Draft(
            prompt=(
                f"{_INSTRUCTION}\n\nThe following are given documents.\n\n{context}\n\n"
                f"{_INSTRUCTION}\n\nQuestion: {question.text} Answer:"
            ),
            references=question.answers,
        )

    def score(self, sample: Sample, answer_text: str) -> float:
        return any_found(answer_text, sample.references)


@dataclass(frozen=True, kw_only=True)
class Squad(QuestionAnswering):
    """Answers a question from one of many Wikipedia paragraphs.

    Attributes:
        squad: SQuAD 2.0 file, dev-v2.0.json; questions without an answer are skipped.
    """

    needs: ClassVar[tuple[str, ...]] = ("squad",)

    squad: str | None = None

    def data(self) -> tuple[list[Question], list[str]]:
        return _squad(self.squad)


@dataclass(frozen=True, kw_only=True)
class HotpotQA(QuestionAnswering):
    """Answers a question that needs two of many Wikipedia paragraphs.

    Attributes:
        hotpotqa: HotpotQA file, hotpot_dev_distractor_v1.json.
    """

    needs: ClassVar[tuple[str, ...]] = ("hotpotqa",)

    hotpotqa: str | None = None

    def data(self) -> tuple[list[Question], list[str]]:
        return _hotpotqa(self.hotpotqa)


@functools.lru_cache(maxsize=2)
def _squad(path: str) -> tuple[list[Question], list[str]]:
    articles = _json(path, "squad")
    try:
        articles = [article["paragraphs"] for article in articles["data"]]
        documents = sorted({part["context"] for article in articles for part in article})
        numbers = {document: i for i, document in enumerate(documents)}
        questions = []
        for article in articles:
            near = tuple(numbers[part["context"]] for part in article)
            for part in article:
                for question in part["qas"]:
                    if not question["is_impossible"]:
                        answers = tuple(answer["text"] for answer in question["answers"])
                        needed = (numbers[part["context"]],)
                        questions.append(Question(question["question"], answers, needed, near))
    except (KeyError, TypeError, IndexError) as error:
        raise _malformed(path, "squad", "SQuAD 2.0", error) from error
    return questions, documents


@functools.lru_cache(maxsize=2)
def _hotpotqa(path: str) -> tuple[list[Question], list[str]]:
    entries = _json(path, "hotpotqa")
    try:
        texts = [[f"{title}\n{''.join(part)}" for title, part in e["context"]] for e in entries]
        documents = sorted({text for each in texts for text in each})
        numbers = {document: i for i, document in enumerate(documents)}
        questions = [
            Question(
                entry["question"],
                (entry["answer"],),
                tuple(dict.fromkeys(numbers[text] for text in own)),
            )
            for entry, own in zip(entries, texts, strict=True)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(path, "hotpotqa", "HotpotQA", error) from error
    return questions, documents


def _json(path: str, option: str) -> Any:
    try:
        return json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f'{option}: "{path}" cannot be read ({error.strerror})') from error
    except (ValueError, RecursionError) as error:
        raise UserError(f'{option}: "{path}" is not valid JSON ({error})') from error


def _malformed(path: str, option: str, form: str, error: Exception) -> UserError:
    what = f"a field {error} is missing" if isinstance(error, KeyError) else str(error)
    return UserError(f'{option}: "{path}" is not in the format of {form}: {what}')
