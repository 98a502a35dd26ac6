"""RULER's question answering (scripts/data/synthetic/qa.py), from the published files.

`ruler_qa_1` reads SQuAD 2.0 (dev-v2.0.json), `ruler_qa_2` HotpotQA
(hotpot_dev_distractor_v1.json).
"""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from mtraining_jax.data.tokenizer import Tokenizer
from mtraining_jax.evaluation.tasks.metrics import any_found
from mtraining_jax.evaluation.tasks.records import read_text
from mtraining_jax.evaluation.tasks.sized import Draft, SizedTask
from mtraining_jax.evaluation.tasks.task import Sample
from mtraining_jax.utils.errors import UserError

_INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words."
)


class Question(NamedTuple):
    """One question with its accepted answers.

    Attributes:
        needed: indices of the documents that it is about.
        near: indices of documents of the same article, the strongest distractors.
    """

    text: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    near: tuple[int, ...] = ()


# Questions and documents.
Data = tuple[list[Question], list[str]]


@dataclass(frozen=True, kw_only=True)
class QuestionAnswering(SizedTask):
    """Answers a question from one or several of many documents.

    Attributes:
        format: name of the file's format, for messages.
        parse: reads the content of a file.
    """

    max_new_tokens: ClassVar[int] = 32
    format: ClassVar[str]
    parse: ClassVar[Callable[[Any], Data]]

    def data(self) -> Data:
        option = self.needs[0]
        return _read(Path(getattr(self, option)), option, self.format, type(self).parse)

    def check(self) -> None:
        super().check()
        self.data()

    def count(self, tokenizer: Tokenizer | None, length: int | None = None) -> int:
        return len(self.data()[0])

    def build(self, size: int, length: int, number: int, seed: int) -> Draft:
        """Builds a draft; a piece is a document."""
        questions, documents = self.data()
        question = questions[max(number, 0)]
        stream = self.stream(length, number, seed)
        if size < len(documents):
            shown = list(question.needed)
            near = [i for i in question.near if i not in question.needed]
            wanted = max(0, size - len(shown))
            if wanted > len(near):
                taken = {*shown, *near}
                others = [i for i in range(len(documents)) if i not in taken]
                drawn = stream.sample(len(others), min(wanted - len(near), len(others)))
                shown += near + [others[i] for i in drawn]
            else:
                shown += [near[i] for i in stream.sample(len(near), wanted)]
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


def _squad(content: Any) -> Data:
    articles = [article["paragraphs"] for article in content["data"]]
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
    return questions, documents


def _hotpotqa(content: Any) -> Data:
    texts = [[f"{title}\n{''.join(part)}" for title, part in e["context"]] for e in content]
    documents = sorted({text for each in texts for text in each})
    numbers = {document: i for i, document in enumerate(documents)}
    questions = []
    for entry, own in zip(content, texts, strict=True):
        needed = tuple(dict.fromkeys(numbers[text] for text in own))
        questions.append(Question(entry["question"], (entry["answer"],), needed))
    return questions, documents


@dataclass(frozen=True, kw_only=True)
class Squad(QuestionAnswering):
    """Answers a question from one of many Wikipedia paragraphs.

    Attributes:
        squad: SQuAD 2.0 file, dev-v2.0.json; questions without an answer are skipped.
    """

    needs: ClassVar[tuple[str, ...]] = ("squad",)
    format: ClassVar[str] = "SQuAD 2.0"
    parse: ClassVar[Callable[[Any], Data]] = _squad

    squad: str | None = None


@dataclass(frozen=True, kw_only=True)
class HotpotQA(QuestionAnswering):
    """Answers a question that needs two of many Wikipedia paragraphs.

    Attributes:
        hotpotqa: HotpotQA file, hotpot_dev_distractor_v1.json.
    """

    needs: ClassVar[tuple[str, ...]] = ("hotpotqa",)
    format: ClassVar[str] = "HotpotQA"
    parse: ClassVar[Callable[[Any], Data]] = _hotpotqa

    hotpotqa: str | None = None


@functools.lru_cache(maxsize=4)
def _read(path: Path, option: str, form: str, parse: Callable[[Any], Data]) -> Data:
    try:
        content = json.loads(read_text(path, option))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{option}: {path} is not valid JSON ({error})") from error
    try:
        questions, documents = parse(content)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        what = f"a field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{option}: {path} is not in the format of {form}: {what}") from error
    if not questions:
        raise UserError(f"{option}: {path} has no answerable question")
    return questions, documents
