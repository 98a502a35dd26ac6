"""Options of text generation. Does not import JAX."""

from typing import Literal

from mtraining_jax.utils.fields import options
from mtraining_jax.utils.limits import (
    NonNegativeFloat,
    PositiveFraction,
    PositiveInt,
    Seed,
    TextList,
)

# What tokens of an answer attend to after a sparse prompt: selected blocks, all earlier tokens, or
# (given answers) what they attend to in a sparse pass over prompt and answer, as in training.
AnswerKind = Literal["sparse", "dense", "one-pass"]


@options
class GenerateOptions:
    """Options of generation.

    Raises:
        UserError: for an invalid value.
    """

    max_new_tokens: PositiveInt = 256
    """Maximum number of new tokens."""
    temperature: NonNegativeFloat = 0.0
    """Divisor of the logits; 0 is greedy decoding, the limit of small values."""
    top_p: PositiveFraction = 1.0
    """Nucleus sampling from the most likely tokens with this total probability (at the
    temperature), at least one; 1 samples from all."""
    seed: Seed = 0
    """Random seed; the same seed, prompt and options give the same tokens."""
    stop: TextList = ()
    """Texts that end generation; they are not part of the result. They may contain special tokens,
    and must begin in the new text."""

    @property
    def kind(self) -> str:
        """The sampling program: "greedy", "all" or "top_p"."""
        if self.temperature == 0:
            return "greedy"
        return "all" if self.top_p == 1 else "top_p"
