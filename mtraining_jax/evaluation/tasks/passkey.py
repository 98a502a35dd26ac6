"""Passkey retrieval with the template of Landmark Attention (Mohtashami and Jaggi, 2023)."""

from dataclasses import dataclass
from typing import ClassVar

from mtraining_jax.evaluation.tasks.haystack import NOISE, insert_at_depth
from mtraining_jax.evaluation.tasks.sized import DepthTask, Draft


@dataclass(frozen=True, kw_only=True)
class Passkey(DepthTask):
    """Finds a five-digit key in a text that repeats one phrase."""

    max_new_tokens: ClassVar[int] = 16
    teacher_forced: ClassVar[bool] = True

    def build(self, size: int, length: int, number: int, seed: int) -> Draft:
        """Builds a draft; a piece is one repetition of the phrase."""
        key = 10_000 + self.stream(length, number, seed).below(90_000)
        needle = f"The pass key is {key}. Remember it. {key} is the pass key."
        depth = self.depth(number)
        context = "\n".join(insert_at_depth([NOISE] * size, needle, depth))
        return Draft(
            prompt=(
                "There is an important info hidden inside a lot of irrelevant text. Find it and "
                "memorize it. I will quiz you about the important information there.\n"
                f"{context}\nWhat is the pass key? The pass key is"
            ),
            references=(str(key),),
            answer=f" {key}",
            depth=depth,
        )
