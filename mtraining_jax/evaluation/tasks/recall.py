"""Multi-query associative recall over token ids (Arora et al., 2023, "Zoology").

For models that were trained on it: the ids mean nothing to others.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mtraining_jax.data.tokenizer import Tokenizer
from mtraining_jax.errors import UserError
from mtraining_jax.evaluation.tasks.task import Sample, Task
from mtraining_jax.limits import check_limits, limited
from mtraining_jax.random_bits import Stream

# A label that does not count.
NOT_ASKED = -100


def mqar(length: int, pairs: int, vocab_size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A sequence that pairs keys with values in its first half and asks for them in the second.

    Ids below V/2 are filler, V/2 to 3V/4 - 1 keys, the others values. Keys are different from each
    other. Pairs lie at even positions of the first half, questions (the key, then its value) at
    even positions of the second half.

    Args:
        length: S, tokens; divisible by 4, and S/4 at least `pairs`.
        pairs: each is asked for once.
        vocab_size: V, divisible by 4, and V/4 at least `pairs`.
        seed: of everything.

    Returns:
        ``(tokens, labels)``, int32 [S] each. A label stands at the asked key and is its value; the
        others are -100.
    """
    filler, keys = vocab_size // 2, vocab_size // 4
    tokens = Stream(seed, 1).below_each(np.full(length, filler))
    key = filler + np.array(Stream(seed, 2).sample(keys, pairs))
    first_value = filler + keys
    value = first_value + Stream(seed, 3).below_each(np.full(pairs, vocab_size - first_value))
    written = 2 * np.array(Stream(seed, 4).sample(length // 4, pairs))
    asked = length // 2 + 2 * np.array(Stream(seed, 5).sample(length // 4, pairs))
    for places in (written, asked):
        tokens[places], tokens[places + 1] = key, value
    labels = np.full(length, NOT_ASKED)
    labels[asked] = value
    return tokens.astype(np.int32), labels.astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class AssociativeRecall(Task):
    """Recalls the values of keys that are asked for anywhere in the second half, on token ids.

    The prompt is the first half. A sparse index is chosen from the prompt's last queries, before
    any question: this shows whether it serves queries that it was not chosen for.

    Attributes:
        pairs: Pairs of key and value, each asked for once.
        vocab_size: Ids of the task; the model must have been trained on it with as many.
    """

    needs_tokenizer: ClassVar[bool] = False
    teacher_forced: ClassVar[bool] = True

    pairs: limited(int, ge=1) = 32
    vocab_size: limited(int, ge=8) = 8192

    def __post_init__(self) -> None:
        check_limits(self)
        if self.vocab_size % 4 or self.vocab_size < 4 * self.pairs:
            raise ValueError(
                f"vocab_size={self.vocab_size} must be divisible by 4 and at least "
                f"{4 * self.pairs}, for pairs={self.pairs}"
            )

    def sample(self, length: int, number: int, seed: int, tokenizer: Tokenizer | None) -> Sample:
        """As of `Task`. A length that is not divisible by 4 is rounded down."""
        if length // 4 < self.pairs:
            raise UserError(
                f'length {length} is too short for task "{self.name}": with pairs={self.pairs} it '
                f"must be at least {4 * self.pairs}"
            )
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
        """Share of the values that are the most likely token."""
        return float(np.mean(is_most_likely[list(sample.scored)]))

    def score(self, sample: Sample, answer_text: str) -> float:
        """Not possible: the questions are part of what follows the prompt."""
        raise UserError(f'task "{self.name}" is scored by teacher forcing only, not by generation')
