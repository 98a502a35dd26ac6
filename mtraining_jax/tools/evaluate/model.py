"""The interface of a model under evaluation; `Engine` implements it."""

from typing import NamedTuple, Protocol

import numpy as np

from mtraining_jax.data.tokenizer import Tokenizer
from mtraining_jax.tools.evaluate.engine.options import GenerateOptions


class Forced(NamedTuple):
    """Scores of a given answer of n tokens after a prompt."""

    log_probs: np.ndarray  # fp32 [n], natural logarithms
    is_argmax: np.ndarray  # bool [n], whether a token is the most likely one
    density: float | None  # of the pass over the padded prompt, mean over layers


class Generated(NamedTuple):
    """A generated continuation of a prompt."""

    tokens: tuple[int, ...]  # without the end token
    text: str  # up to a stop text; "" without a tokenizer
    stopped: str  # "end" (end token), "stop" (stop text) or "length" (token limit)
    prefill_seconds: float  # time to the first new token, without compilation
    decode_seconds: float
    density: float | None  # of the prompt


class Model(Protocol):
    """What `evaluate` needs of a model: members of `Engine`."""

    tokenizer: Tokenizer | None
    vocab_size: int
    max_positions: int

    def losses_and_density(self, tokens: np.ndarray) -> tuple[np.ndarray, float | None]: ...

    def forced(self, prompt_ids: np.ndarray, answer_ids: np.ndarray) -> Forced: ...

    def generate(self, prompt_ids: np.ndarray, options: GenerateOptions) -> Generated: ...
