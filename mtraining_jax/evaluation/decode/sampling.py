"""Samples the next token, and scores a given one."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array

from mtraining_jax.errors import UserError


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


def next_token(
    logits_BV: Array, kind: str, temperature: Array, top_p: Array, seed: Array, number: Array
) -> Array:
    """Samples the next token of each sequence.

    Args:
        logits_BV: fp32 [B, V].
        kind: see `GenerateOptions`, static.
        temperature, top_p: fp32 scalars, see `GenerateOptions`.
        seed: uint32 scalar.
        number: int32 scalar, number of tokens sampled before.

    Returns:
        int32 [B].
    """
    if kind == "greedy":
        return jnp.argmax(logits_BV, -1).astype(jnp.int32)
    logits_BV = logits_BV / temperature
    if kind == "top_p":
        logits_BV = jnp.where(kept_tokens(logits_BV, top_p), logits_BV, -jnp.inf)
    key = jax.random.fold_in(jax.random.key(seed), number)
    return jax.random.categorical(key, logits_BV).astype(jnp.int32)


@jax.jit
def judge(logits_BV: Array, label_B: Array) -> tuple[Array, Array]:
    """Scores a given next token.

    Args:
        logits_BV: fp32 [B, V].
        label_B: int32 [B].

    Returns:
        fp32 [B], the log probability of the label, and bool [B], whether it is the most likely.
    """
    log_probs = jax.nn.log_softmax(logits_BV, axis=-1)
    own = jnp.take_along_axis(log_probs, label_B[:, None], axis=-1)[:, 0]
    return own, jnp.argmax(logits_BV, axis=-1) == label_B


def kept_tokens(logits_BV: Array, top_p: Array) -> Array:
    """Selects the most likely tokens with a total probability of `top_p`, at least one.

    It keeps the token with which the sum reaches `top_p`, and tokens that are as likely (nucleus
    sampling, arXiv 1904.09751).

    Args:
        logits_BV: fp32 [B, V].
        top_p: fp32 scalar.

    Returns:
        bool [B, V].
    """
    descending = jnp.sort(logits_BV, axis=-1, descending=True)
    probabilities = jax.nn.softmax(descending, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    lowest = jnp.min(jnp.where(before < top_p, descending, jnp.inf), axis=-1, keepdims=True)
    return logits_BV >= lowest
