"""From text to token ids: raw bytes, or a Hugging Face ``tokenizer.json``."""

import functools
from pathlib import Path
from typing import Protocol

import numpy as np

from mtraining_jax.bounded import LARGEST_TOKENIZER, check_size, read_json
from mtraining_jax.data.files import first_line
from mtraining_jax.errors import UserError

# End-of-document tokens of common model families; a vocabulary must have exactly one of them.
_EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>")


# The value of data.tokenizer that does not name a file.
BYTES = "bytes"


class Tokenizer(Protocol):
    """What sources need from a tokenizer."""

    name: str  # for messages
    vocab_size: int  # every id is below it
    eos: int  # the id that ends a document
    start: int | None  # the id that stands for the start of a text, if there is one

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a document, without its end: integers [n]."""
        ...

    def encode_prompt(self, text: str) -> np.ndarray:
        """Token ids of a text that is to go on, with tokens that belong before it: integers [n]."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """Text of token ids, for people to read."""
        ...


class ByteTokenizer:
    """One token a UTF-8 byte (ids 0 to 255), and 256 for the end of a document."""

    name = BYTES
    vocab_size = 257
    start = None

    def __init__(self, eos: int | str | None = None):
        if isinstance(eos, str):
            raise UserError(
                f'data.eos = "{eos}" must be an id, from 0 to 256: data.tokenizer = "bytes" has no '
                "tokens with a name"
            )
        self.eos = _checked_eos(256 if eos is None else eos, self.vocab_size, self.name)

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a document, without its end: uint8 [n]."""
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def encode_prompt(self, text: str) -> np.ndarray:
        """The same as `encode`."""
        return self.encode(text)

    def decode(self, ids: np.ndarray) -> str:
        """Text of token ids; ends of documents are left out."""
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A ``tokenizer.json`` read by the ``tokenizers`` library.

    Nothing is added to a document (no template) and nothing cut off, whatever the file asks for.

    Args:
        path: the ``tokenizer.json``.
        eos: id or text of the token that ends a document. None takes the one usual end token that
        the vocabulary has.

    Raises:
        UserError: the file cannot be read, or the end token is not known.
    """

    def __init__(self, path: str | Path, eos: int | str | None = None):
        # Not at the top: runs on bytes or token files need not load a tokeniser library.
        from tokenizers import Tokenizer as Backend

        self.name = str(path)
        if not Path(path).is_file():
            raise UserError(
                f'data.tokenizer = "{self.name}" is no file: it must be "bytes" or the path of a '
                "tokenizer.json"
            )
        check_size(path, LARGEST_TOKENIZER)
        try:
            self._backend = Backend.from_file(self.name)
        except Exception as error:  # the library raises bare Exception
            raise UserError(
                f'data.tokenizer = "{self.name}" is not a tokenizer.json ({first_line(error)})'
            ) from error
        self._backend.no_truncation()
        self._backend.no_padding()
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError(f'data.tokenizer = "{self.name}" has an empty vocabulary')
        # Not the number of entries: ids may have gaps.
        self.vocab_size = max(vocabulary.values()) + 1
        self.eos = _checked_eos(_find_eos(eos, vocabulary, self.name), self.vocab_size, self.name)

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a document, without its end: uint32 [n]."""
        return np.asarray(self._backend.encode(text, add_special_tokens=False).ids, np.uint32)

    def encode_prompt(self, text: str) -> np.ndarray:
        """Token ids with those that the file's template adds, as one for the start: uint32 [n]."""
        return np.asarray(self._backend.encode(text, add_special_tokens=True).ids, np.uint32)

    @functools.cached_property
    def start(self) -> int | None:
        """`bos_token` of the tokenizer_config.json beside the file; None if it has none."""
        path = Path(self.name).with_name("tokenizer_config.json")
        try:
            token = read_json(path).get("bos_token")
        except FileNotFoundError:
            return None
        except UserError:
            raise
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"{path} cannot be read ({first_line(error)})") from error
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None and not isinstance(token, str):
            raise UserError(f"{path} cannot be read (bos_token is no text)")
        return None if token is None else self._backend.token_to_id(token)

    def decode(self, ids: np.ndarray) -> str:
        """Text of token ids; special tokens are left out."""
        return self._backend.decode([int(i) for i in ids])


def make_tokenizer(name: str, eos: int | str | None = None) -> Tokenizer:
    """Makes the tokeniser that ``data.tokenizer`` names.

    Args:
        name: "bytes", or the path of a ``tokenizer.json`` (``~`` is the home folder).
        eos: id or text of the end-of-document token; None for the tokeniser's own.

    Returns:
        The tokeniser.

    Raises:
        UserError: an unreadable file or an unknown end token.
    """
    if name == BYTES:
        return ByteTokenizer(eos)
    return HuggingFaceTokenizer(Path(name).expanduser(), eos)


def _find_eos(eos: int | str | None, vocabulary: dict[str, int], name: str) -> int:
    if isinstance(eos, int):
        return eos
    if isinstance(eos, str):
        if eos not in vocabulary:
            raise UserError(f'data.eos = "{eos}" is not a token of data.tokenizer = "{name}"')
        return vocabulary[eos]
    found = [token for token in _EOS_NAMES if token in vocabulary]
    if len(found) != 1:
        has = f"has {' and '.join(found)}" if found else f"has none of {', '.join(_EOS_NAMES)}"
        raise UserError(
            f'data.eos is not set, and data.tokenizer = "{name}" {has}; set data.eos to the token '
            "that ends a document, or its id"
        )
    return vocabulary[found[0]]


def _checked_eos(eos: int, vocab_size: int, name: str) -> int:
    if not 0 <= eos < vocab_size:
        raise UserError(
            f"data.eos = {eos} must be from 0 to {vocab_size - 1}: those are the ids of "
            f'data.tokenizer = "{name}"'
        )
    return eos
