"""Label masks: documents in which only some tokens are trained."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mtraining_jax.data.tokenizer import Tokenizer
from mtraining_jax.models.labels import IGNORE_LABEL
from mtraining_jax.utils.errors import UserError


@dataclass(frozen=True, eq=False)
class MaskedTokens:
    """A document with a label mask; without one, all of its tokens are trained.

    Attributes:
        ids: Token ids, integers [n].
        trained: Whether the loss counts each token as a label, bool [n]; None: all.
        note: Counted in the summary of the data: "with a prompt that ...".
    """

    ids: np.ndarray
    trained: np.ndarray | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if self.trained is None:
            return
        if self.ids.ndim != 1 or self.ids.shape != self.trained.shape:
            raise UserError(
                f"token ids of shape {list(self.ids.shape)} have a label mask of shape "
                f"{list(self.trained.shape)}; it must have one value per token"
            )
        if self.trained.dtype != bool:
            raise UserError(f"a label mask is {self.trained.dtype}, not bool")

    @property
    def content(self) -> bytes:
        """As in `MaskedText`."""
        return self.ids.tobytes() + (b"" if self.trained is None else self.trained.tobytes())


def joined(pieces: Sequence[MaskedTokens]) -> MaskedTokens:
    """Concatenates documents; the result has a mask if one of them has."""
    ids = np.concatenate([tokens.ids for tokens in pieces])
    if all(tokens.trained is None for tokens in pieces):
        return MaskedTokens(ids)
    masks = (np.ones(x.ids.size, bool) if x.trained is None else x.trained for x in pieces)
    return MaskedTokens(ids, np.concatenate(list(masks)))


class MaskedText(Protocol):
    """A document that becomes token ids and their mask with the tokenizer of the run."""

    @property
    def content(self) -> bytes:
        """Equal only for equal documents: detects changes of a corpus."""
        ...

    def tokens(self, tokenizer: Tokenizer) -> MaskedTokens: ...


@dataclass(frozen=True)
class Completion:
    """A prompt, which is not trained, and the text that follows it."""

    prompt: str
    text: str

    @property
    def content(self) -> bytes:
        size = len(self.prompt).to_bytes(8, "little")
        return size + (self.prompt + self.text).encode("utf-8", "surrogatepass")

    def tokens(self, tokenizer: Tokenizer) -> MaskedTokens:
        """Trains the tokens from the first one that is not among those of the prompt alone."""
        prompt, ids = tokenizer.encode(self.prompt), tokenizer.encode(self.prompt + self.text)
        size = min(prompt.size, ids.size)
        differ = np.flatnonzero(prompt[:size] != ids[:size])
        first = int(differ[0]) if differ.size else size
        note = "" if first == prompt.size else "with a prompt that ends inside a token"
        return MaskedTokens(ids, np.arange(ids.size) >= first, note)


def label_mask(values: Any, ids: np.ndarray, where: str, field: str) -> np.ndarray:
    """The label mask, bool [n], that a column has for a document of token ids [n].

    Args:
        values: 0 or 1 (or false, true) for each token, or its label as in Hugging Face data sets:
            `IGNORE_LABEL` or its id.
        where, field: location of the document, and option of the column.
    """
    mask = integers(values, f"{where}: the list of {field}", "biu")
    if mask.size != ids.size:
        raise UserError(
            f"{where}: the list of {field} has {mask.size:,} values for {ids.size:,} token ids"
        )
    if not mask.size or (mask.min() >= 0 and mask.max() <= 1):
        return mask.astype(bool)
    ignored = mask == IGNORE_LABEL
    wrong = ~ignored & (mask != ids)
    if wrong.any():
        neither = wrong & ((mask < 0) | (mask > 1))
        at = int(np.argmax(neither if neither.any() else wrong))
        raise UserError(
            f"{where}: the list of {field} has {mask[at]} at position {at}; it must have 0 or 1 "
            f"for each token, or labels: {IGNORE_LABEL} or the token id, here {ids[at]}"
        )
    return ~ignored


def integers(values: Any, what: str, kinds: str = "iu") -> np.ndarray:
    """A list of integers as an array [n] with a dtype of one of these kinds."""
    try:
        found = np.asarray(values)
    except ValueError:  # a ragged list
        found = np.zeros((), object)
    if found.ndim == 1 and not found.size:
        return np.zeros(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in kinds:
        raise UserError(f"{what} is not a list of integers")
    return found
