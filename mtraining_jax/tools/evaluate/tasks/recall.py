"""Multi-query associative recall over token ids (Arora et al., 2023), for models trained on it."""

from typing import Annotated, ClassVar

import numpy as np

from mtraining_jax.data.tokenizer import Tokenizer
from mtraining_jax.tools.evaluate.tasks.task import Sample, Task
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.limits import Ge, PositiveInt
from mtraining_jax.utils.random_bits import Stream

# Label of tokens that are not scored.
NOT_ASKED = -100


def mqar(length: int, pairs: int, vocab_size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Builds tokens and labels, int32 [S] each; the label of a queried key is its value, else -100.

    Ids below V/2 are filler, ids from V/2 to 3V/4 - 1 are different keys, and the others are
    values. Pairs lie at even positions of the first half, and queries (a key, then its value) at
    even positions of the second half.
    """
    filler, keys = vocab_size // 2, vocab_size // 4
    tokens = Stream(seed, 1).below_each(np.full(length, filler))
    key = filler + np.array(Stream(seed, 2).sample(keys, pairs))
    first_value = filler + keys
    value = first_value + Stream(seed, 3).below_each(np.full(pairs, vocab_size - first_value))
    written = 2 * np.array(Stream(seed, 4).sample(length // 4, pairs))
    asked = length // 2 + 2 * np.array(Stream(seed, 5).sample(length // 4, pairs))
    for positions in (written, asked):
        tokens[positions], tokens[positions + 1] = key, value
    labels = np.full(length, NOT_ASKED)
    labels[asked] = value
    return tokens.astype(np.int32), labels.astype(np.int32)


@options(kw_only=True)
class AssociativeRecall(Task):
    """Recalls the values of keys that are queried anywhere in the second half, on token ids.

    The prompt is the first half. A sparse index is selected from the prompt's last queries, before
    any question, so this tests whether the index works for queries that it was not selected for.
    """

    needs_tokenizer: ClassVar[bool] = False
    teacher_forced: ClassVar[bool] = True

    pairs: PositiveInt = 32
    """Number of key-value pairs; each is queried once."""
    vocab_size: Annotated[int, Ge(8)] = 8192
    """Number of token ids; must equal that of the model's training task."""

    def __post_init__(self) -> None:
        if self.vocab_size % 4 or self.vocab_size < 4 * self.pairs:
            raise ValueError(
                f"vocab_size={self.vocab_size} must be divisible by 4 and at least "
                f"{4 * self.pairs}, for pairs={self.pairs}"
            )

    def check_length(
        self, length: int, samples: int, seed: int, tokenizer: Tokenizer | None
    ) -> None:
        if length // 4 < self.pairs:
            raise UserError(
                f'length {length} is too short for task "{self.name}"; with pairs={self.pairs} it '
                f"must be at least {4 * self.pairs}"
            )

    def sample(self, length: int, number: int, seed: int, tokenizer: Tokenizer | None) -> Sample:
        self.check_length(length, 1, seed, tokenizer)
        own_seed = int(self.stream(length, number, seed).bits(1)[0])
        tokens, labels = mqar(length // 4 * 4, self.pairs, self.vocab_size, own_seed)
        half = tokens.size // 2
        asked = np.flatnonzero(labels != NOT_ASKED)
        return Sample(
            task=self.name,
            length=length,
            number=number,
            prompt=tuple(tokens[:half].tolist()),
            prompt_ids=tokens[:half],
            references=tuple(labels[asked].tolist()),
            max_new_tokens=half,
            answer=tuple(tokens[half:].tolist()),
            answer_ids=tokens[half:],
            scored=tuple((asked + 1 - half).tolist()),
        )

    def score_forced(self, sample: Sample, is_most_likely: np.ndarray) -> float:
        assert sample.scored is not None  # see `sample`
        return float(np.mean(is_most_likely[list(sample.scored)]))

    def score(self, sample: Sample, answer_text: str) -> float:
        # The questions are part of what follows the prompt.
        raise UserError(f'task "{self.name}" supports teacher forcing only, not --generate')
