"""Options of text generation. Does not import JAX."""

import dataclasses
import math

from mtraining_jax.utils.errors import UserError


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """Options of generation.

    Attributes:
        max_new_tokens: maximum number of new tokens.
        temperature: divisor of the logits; 0 is greedy decoding.
        top_p: nucleus sampling from the most likely tokens with this total probability (at the
            temperature); 1 samples from all.
        seed: random seed; the same seed, prompt and options give the same tokens.
        stop: texts that end generation; they are not part of the result.

    Raises:
        UserError: for an invalid value.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens = {self.max_new_tokens} must be at least 1")
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature = {self.temperature} must be a finite number >= 0")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p = {self.top_p} must be above 0 and at most 1")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed = {self.seed} must be from 0 to {2**32 - 1}")
        if any(not text for text in self.stop):
            raise UserError("stop contains an empty text, which would match immediately")

    @property
    def kind(self) -> str:
        """The sampling program: "greedy", "all" or "top_p"."""
        if self.temperature == 0:
            return "greedy"
        return "all" if self.top_p == 1 else "top_p"
