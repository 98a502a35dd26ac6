"""The interface of a model under evaluation; `Engine` implements it."""

from typing import NamedTuple, Protocol

import numpy as np

from mtraining_jax.data.tokenizer import Tokenizer
from mtraining_jax.evaluation.engine.options import GenerateOptions


class Forced(NamedTuple):
    """Scores of a given answer of n tokens after a prompt.

    Attributes:
        log_probs: fp32 [n], natural log probability of each token after those before it.
        is_argmax: bool [n], whether it is the most likely one.
        density: computed over causal pairs of the padded sequence, mean over layers; of the
            prompt's pass if the answer is scored in steps. None if unknown.
    """

    log_probs: np.ndarray
    is_argmax: np.ndarray
    density: float | None


class Generated(NamedTuple):
    """A generated continuation of a prompt.

    Attributes:
        tokens: new ids, without the end token.
        text: their text up to a stop text; "" without a tokenizer.
        stopped: "end" (end token), "stop" (stop text) or "length" (token limit).
        prefill_seconds: time to the first new token, without compilation.
        density: of the prompt's pass, as in `Forced`.
    """

    tokens: tuple[int, ...]
    text: str
    stopped: str
    prefill_seconds: float
    decode_seconds: float
    density: float | None


class Model(Protocol):
    """What `evaluate` needs of a model."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int:
        """Maximum context length in tokens."""
        ...

    def token_losses(self, tokens: np.ndarray) -> np.ndarray:
        """int32 [S] -> fp32 [S - 1], -log p of each token except the first."""
        ...

    def forced(self, prompt_ids: np.ndarray, answer_ids: np.ndarray) -> Forced:
        """Scores a given answer."""
        ...

    def generate(self, prompt_ids: np.ndarray, options: GenerateOptions) -> Generated:
        """Generates new tokens one by one."""
        ...
