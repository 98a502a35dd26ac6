"""RULER's question answering (scripts/data/synthetic/qa.py), from the published files."""

import functools
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from mtraining_jax.data.tokenizer import Tokenizer
from mtraining_jax.tools.evaluate.tasks.metrics import any_found
from mtraining_jax.tools.evaluate.tasks.records import read_json
from mtraining_jax.tools.evaluate.tasks.sized import Draft, SizedTask
from mtraining_jax.tools.evaluate.tasks.task import Sample
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import options

_INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words."
)


class Question(NamedTuple):
    """One question with the documents that it needs, and others of the same article."""

    text: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    near: tuple[int, ...] = ()


# Questions and documents.
Data = tuple[list[Question], list[str]]


@options(kw_only=True)
class QuestionAnswering(SizedTask):
    """Answers a question from one or two of many Wikipedia paragraphs."""

    max_new_tokens: ClassVar[int] = 32

    squad: str | None = None
    """SQuAD 2.0 file, dev-v2.0.json, for ruler_qa_1; questions without an answer are skipped."""
    hotpotqa: str | None = None
    """HotpotQA file, hotpot_dev_distractor_v1.json, for ruler_qa_2."""

    @property
    def needs(self) -> tuple[str, ...]:
        return ("squad",) if self.name == "ruler_qa_1" else ("hotpotqa",)

    @functools.cached_property
    def data(self) -> Data:
        (option,) = self.needs
        path = Path(getattr(self, option))
        content = read_json(path, option)
        try:
            questions, documents = _squad(content) if option == "squad" else _hotpotqa(content)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            title = {"squad": "SQuAD 2.0", "hotpotqa": "HotpotQA"}[option]
            what = f"a field {error} is missing" if isinstance(error, KeyError) else error
            raise UserError(f"{option}: {path} is not in the format of {title}: {what}") from error
        if not questions:
            raise UserError(f"{option}: {path} has no answerable question")
        return questions, documents

    def check(self) -> None:
        super().check()
        _ = self.data  # reads and checks the file

    def count(self, tokenizer: Tokenizer | None, length: int) -> int:
        return len(self.data[0])

    def build(self, size: int, length: int, number: int, seed: int) -> Draft:
        questions, documents = self.data
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
        prompt = (
            f"{_INSTRUCTION}\n\nThe following are given documents.\n\n{context}\n\n"
            f"{_INSTRUCTION}\n\nQuestion: {question.text} Answer:"
        )
        return Draft(prompt=prompt, references=question.answers)

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
