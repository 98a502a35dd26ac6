"""A model without parameters that reads its prompt, to test the code around models."""

import dataclasses
import re

import numpy as np

from mtraining_jax.data.tokenizer import ByteTokenizer
from mtraining_jax.tools.evaluate.model import Forced, Generated


@dataclasses.dataclass
class FakeModel:
    """Answers with the seven-digit number in the last `window` bytes, or with 0000000.

    The loss of a byte is 1 / its position, plus `worse`.
    """

    window: int | None = None
    max_positions: int = 65536
    vocab_size: int = 257
    worse: float = 0.0
    asked: int = 0
    stop_after: int | None = None  # number of questions before a Ctrl-C
    tokenizer: ByteTokenizer | None = dataclasses.field(default_factory=ByteTokenizer)

    def read(self, prompt_ids):
        self.asked += 1
        if self.stop_after is not None and self.asked > self.stop_after:
            raise KeyboardInterrupt
        text = bytes(prompt_ids.tolist()).decode()
        seen = text if self.window is None else text[-self.window :]
        found = re.findall(r"number is: (\d{7})", seen)
        return f" {found[0]}" if found else " 0000000"

    def forced(self, prompt_ids, answer_ids):
        says = np.frombuffer(self.read(prompt_ids).encode(), np.uint8)
        right = says == answer_ids
        density = 1.0 if self.window is None else 0.25
        log_probs = np.where(right, -0.125, -2.0).astype(np.float32)
        return Forced(log_probs, right, density)

    def generate(self, prompt_ids, options):
        assert options.temperature == 0
        text = f"{self.read(prompt_ids)}. That is it."[: options.max_new_tokens]
        return Generated((), text, "length", 0.5, 0.25, density=None)

    def losses_and_density(self, tokens):
        self.asked += 1
        losses = (1 / np.arange(1, len(tokens)) + self.worse).astype(np.float32)
        return losses, 1.0 if self.window is None else 0.125
