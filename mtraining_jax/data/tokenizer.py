"""Tokenizers: raw bytes, or a Hugging Face ``tokenizer.json``."""

from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from mtraining_jax.data.files import first_line
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.file_limits import LARGEST_TOKENIZER, absence, check_size, read_json

# End tokens of common model families; a vocabulary must have exactly one of them.
_EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>")

BYTES = "bytes"  # the value of data.tokenizer that is not a file


class Tokenizer(Protocol):
    """Interface of tokenizers."""

    name: str  # for messages
    vocab_size: int  # all ids are below this
    eos: int  # end-of-document token

    @property
    def start(self) -> int | None: ...  # beginning-of-sequence token, if any

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a document without eos, integers [n]."""
        ...

    def encode_prompt(self, text: str) -> np.ndarray:
        """Token ids of a prompt, including prefix tokens, integers [n]."""
        ...

    def decode(self, ids: np.ndarray) -> str: ...


class ByteTokenizer:
    """One token per UTF-8 byte (ids 0 to 255), and 256 as end of a document."""

    name: str = BYTES
    vocab_size: int = 257
    start: int | None = None

    def __init__(self, eos: int | str | None = None):
        if isinstance(eos, str):
            raise UserError(
                f'data.eos = "{eos}" must be an id from 0 to 256: data.tokenizer = "bytes" has no '
                "named tokens"
            )
        self.eos = _checked_eos(256 if eos is None else eos, self.vocab_size, self.name)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def encode_prompt(self, text: str) -> np.ndarray:
        return self.encode(text)

    def decode(self, ids: np.ndarray) -> str:
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A ``tokenizer.json``, loaded with the ``tokenizers`` library.

    `encode` ignores the file's templates, truncation and padding.
    """

    def __init__(self, path: str | Path, eos: int | str | None = None):
        self.name = str(path)
        if (inside := Path(path) / "tokenizer.json").is_file():
            raise UserError(f'data.tokenizer = "{self.name}" is a folder; use "{inside}"')
        if not Path(path).is_file():
            why = absence(path) or "is not a file"
            raise UserError(
                f'data.tokenizer = "{self.name}" {why}; it must be "bytes" or the path of a '
                "tokenizer.json"
            )
        check_size(path, LARGEST_TOKENIZER)
        try:
            self._backend = tokenizers.Tokenizer.from_file(self.name)
        except Exception as error:  # the library raises bare Exception
            raise UserError(
                f'data.tokenizer = "{self.name}" is not a tokenizer.json ({first_line(error)})'
            ) from error
        self._backend.no_truncation()
        self._backend.no_padding()
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError(f'data.tokenizer = "{self.name}" has an empty vocabulary')
        # Ids may have gaps.
        self.vocab_size = max(vocabulary.values()) + 1
        self.eos = _checked_eos(_find_eos(eos, vocabulary, self.name), self.vocab_size, self.name)

    def encode_prompt(self, text: str) -> np.ndarray:
        return self.encode(text, add_special_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = False) -> np.ndarray:
        try:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError):  # invalid text
            raise
        except Exception as error:  # the library raises bare Exception, e.g. without unknown token
            raise UserError(
                f'data.tokenizer = "{self.name}" cannot encode text ({first_line(error)})'
            ) from error
        return np.asarray(encoding.ids, np.uint32)

    @property
    def start(self) -> int | None:
        """`bos_token` in the tokenizer_config.json next to the file, if any."""
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
            raise UserError(f"{path} cannot be read (bos_token is not a string)")
        return None if token is None else self._backend.token_to_id(token)

    def decode(self, ids: np.ndarray) -> str:
        return self._backend.decode([int(i) for i in ids])


def make_tokenizer(name: str, eos: int | str | None = None) -> Tokenizer:
    """Creates the tokenizer for values of `data.tokenizer` and `data.eos`."""
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
            f'data.eos is not set, and data.tokenizer = "{name}" {has}; set data.eos to the end '
            "token or its id"
        )
    return vocabulary[found[0]]


def _checked_eos(eos: int, vocab_size: int, name: str) -> int:
    if not 0 <= eos < vocab_size:
        raise UserError(
            f"data.eos = {eos} must be from 0 to {vocab_size - 1}, the ids of data.tokenizer = "
            f'"{name}"'
        )
    return eos
