"""Options of text generation. Does not import JAX."""

import dataclasses

from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.limits import (
    NonNegativeFloat,
    PositiveFraction,
    PositiveInt,
    Seed,
    TextList,
    check_limits,
)


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """Options of generation.

    Attributes:
        max_new_tokens: maximum number of new tokens.
        temperature: divisor of the logits; 0 is greedy decoding, the limit of small values.
        top_p: nucleus sampling from the most likely tokens with this total probability (at the
            temperature), at least one; 1 samples from all.
        seed: random seed; the same seed, prompt and options give the same tokens.
        stop: texts that end generation; they are not part of the result. They may contain special
            tokens, and must begin in the new text.

    Raises:
        UserError: for an invalid value.
    """

    max_new_tokens: PositiveInt = 256
    temperature: NonNegativeFloat = 0.0
    top_p: PositiveFraction = 1.0
    seed: Seed = 0
    stop: TextList = ()

    def __post_init__(self) -> None:
        try:
            check_limits(self)
        except ValueError as error:
            raise UserError(str(error)) from None

    @property
    def kind(self) -> str:
        """The sampling program: "greedy", "all" or "top_p"."""
        if self.temperature == 0:
            return "greedy"
        return "all" if self.top_p == 1 else "top_p"
