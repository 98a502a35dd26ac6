"""A needle in a haystack: one number hidden at some depth of a long text.

Needle and question are those of MInference (Jiang et al., 2024), the passkey that of Landmark
Attention (Mohtashami and Jaggi, 2023). The last words of the prompt let the answer follow directly.
"""

from typing import ClassVar

from mtraining_jax.tools.evaluate.tasks.haystack import NOISE, EssayTask, essays, insert_at_depth
from mtraining_jax.tools.evaluate.tasks.sized import DepthTask, Draft
from mtraining_jax.tools.evaluate.tasks.words import words
from mtraining_jax.utils.fields import options


@options(kw_only=True)
class Needle(DepthTask, EssayTask):
    """Finds the seven-digit number that one sentence in a long text gives for a city."""

    max_new_tokens: ClassVar[int] = 32
    teacher_forced: ClassVar[bool] = True

    def build(self, size: int, length: int, number: int, seed: int) -> Draft:
        stream = self.stream(length, number, seed)
        city, value = stream.choose(words("cities")), str(1_000_000 + stream.below(9_000_000))
        needle = f"\nThe special magic {city} number is: {value}\n"
        depth = self.depth(number)
        context = " ".join(insert_at_depth(essays(self.essays).first(size), needle, depth))
        return Draft(
            prompt=(
                "Read the following text. It holds a special magic number.\n\n"
                f"{context}\n\nQuestion: What is the special magic {city} number?\n"
                f"Answer: The special magic {city} number is:"
            ),
            references=(value,),
            answer=f" {value}",
            depth=depth,
        )


@options(kw_only=True)
class Passkey(DepthTask):
    """Finds a five-digit key in a text that repeats one phrase."""

    max_new_tokens: ClassVar[int] = 16
    teacher_forced: ClassVar[bool] = True

    def build(self, size: int, length: int, number: int, seed: int) -> Draft:
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
