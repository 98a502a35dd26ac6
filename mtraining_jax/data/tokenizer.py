"""Tokenizers: raw bytes, or a Hugging Face ``tokenizer.json``."""

import functools
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import tokenizers.pre_tokenizers

from mtraining_jax.data.files import errors_as, reason
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.file_limits import LARGEST_TOKENIZER, absence, check_size, read_json

# End tokens of common model families; a vocabulary must have exactly one of them.
_EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>")

BYTES = "bytes"  # the value of data.tokenizer that is not a file

_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


def _byte_alphabet() -> dict[str, int]:
    """The byte of each character of byte-level tokens: printable ones of Latin-1 are themselves."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    found = {x: ord(x) for x in alphabet if ord(x) < 256}
    others = (byte for byte in range(256) if chr(byte) not in found)
    return found | dict(zip(alphabet[len(found) :], others, strict=True))


_BYTES = _byte_alphabet()


class Tokenizer:
    """Base class of tokenizers with ids below `vocab_size`, and `eos` to end documents."""

    def __init__(self, name: str, vocab_size: int, eos: int) -> None:
        if not 0 <= eos < vocab_size:
            raise UserError(
                f"data.eos = {eos} must be from 0 to {vocab_size - 1}, the ids of data.tokenizer = "
                f'"{name}"'
            )
        self.name, self.vocab_size, self.eos = name, vocab_size, eos

    @property
    def start(self) -> int | None:
        """Beginning-of-sequence token, if any."""
        return None

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a document without eos, integers [n]."""
        raise NotImplementedError(f"{type(self).__name__}.encode")

    def encode_prompt(self, text: str) -> np.ndarray:
        """Token ids of a prompt, including prefix tokens, integers [n]."""
        return self.encode(text)

    def decode(self, ids: np.ndarray, special: bool = False) -> str:
        """The text of token ids [n], without special tokens unless asked for."""
        raise NotImplementedError(f"{type(self).__name__}.decode")

    @property
    def byte_level(self) -> bool:
        """Whether a text is the UTF-8 decoding of its tokens' bytes."""
        return True

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes of a token that may be a part of a character; None: it is a text."""
        raise NotImplementedError(f"{type(self).__name__}.token_bytes")


class ByteTokenizer(Tokenizer):
    """One token per UTF-8 byte (ids 0 to 255), and 256 as end of a document."""

    def __init__(self, eos: int | str | None = None) -> None:
        if isinstance(eos, str):
            raise UserError(
                f'data.eos = "{eos}" must be an id from 0 to 256: data.tokenizer = "bytes" has no '
                "named tokens"
            )
        super().__init__(BYTES, 257, 256 if eos is None else eos)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def decode(self, ids: np.ndarray, special: bool = False) -> str:
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes | None:
        return bytes([token]) if token < 256 else b""


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json``; `encode` ignores its templates, truncation and padding."""

    def __init__(self, path: str | Path, eos: int | str | None = None) -> None:
        field = f'data.tokenizer = "{path}"'
        if (inside := Path(path) / "tokenizer.json").is_file():
            raise UserError(f'{field} is a folder; use "{inside}"')
        if not Path(path).is_file():
            why = absence(path) or "is not a file"
            raise UserError(f'{field} {why}; it must be "bytes" or the path of a tokenizer.json')
        check_size(path, LARGEST_TOKENIZER)
        # The library raises bare Exception.
        with errors_as(UserError, f"{field} is not a tokenizer.json", Exception):
            self._backend = tokenizers.Tokenizer.from_file(str(path))
        self._backend.no_truncation()
        self._backend.no_padding()
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError(f"{field} has an empty vocabulary")
        # Ids may have gaps.
        vocab_size = max(vocabulary.values()) + 1
        added = {token.content for token in self.added_tokens.values()}
        super().__init__(str(path), vocab_size, _find_eos(eos, vocabulary, added, field))

    def encode_prompt(self, text: str) -> np.ndarray:
        return self.encode(text, add_special_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = False) -> np.ndarray:
        return np.asarray(self._encoding(text, add_special_tokens).ids, np.uint32)

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids of a document, and where their characters begin and end, integers [n]."""
        encoding = self._encoding(text, add_special_tokens=False)
        begins, ends = np.asarray(encoding.offsets, np.int64).reshape(-1, 2).T
        return np.asarray(encoding.ids, np.uint32), begins, ends

    def _encoding(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError):  # invalid text
            raise
        except Exception as error:  # the library raises bare Exception, e.g. without unknown token
            raise UserError(
                f'data.tokenizer = "{self.name}" cannot encode text ({reason(error)})'
            ) from error

    @property
    def settings_file(self) -> Path:
        return Path(self.name).with_name("tokenizer_config.json")

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """The tokenizer_config.json next to the file, if any."""
        if not self.settings_file.exists():
            return {}
        with errors_as(UserError, f"{self.settings_file} cannot be read", Exception):
            return dict(read_json(self.settings_file))

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts of the tokens in `settings`, such as bos_token, by their names."""
        found = {name: x for name, x in self.settings.items() if name.endswith("_token")}
        found = {name: x.get("content") if isinstance(x, dict) else x for name, x in found.items()}
        return {name: token for name, token in found.items() if isinstance(token, str)}

    @property
    def added_tokens(self) -> dict[int, tokenizers.AddedToken]:
        """Special tokens and others that are one token wherever they occur, by id."""
        return self._backend.get_added_tokens_decoder()

    @property
    def start(self) -> int | None:
        """`bos_token`, if any."""
        token = self.special_tokens.get("bos_token")
        return None if token is None else self._backend.token_to_id(token)

    def decode(self, ids: np.ndarray, special: bool = False) -> str:
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=not special)

    @functools.cached_property
    def _decoder_types(self) -> frozenset[str]:
        if self._backend.decoder is None:
            return frozenset()
        decoder = json.loads(self._backend.decoder.__getstate__())
        return frozenset(part["type"] for part in decoder.get("decoders", [decoder]))

    @property
    def byte_level(self) -> bool:
        return {"ByteLevel"} <= self._decoder_types <= {"ByteLevel", "Fuse"}

    def token_bytes(self, token: int) -> bytes | None:
        text = self._backend.id_to_token(token)
        if text is None:  # ids may have gaps, and models more ids than tokenizers
            return b""
        if self.byte_level:
            known = all(character in _BYTES for character in text)
            return bytes(_BYTES[x] for x in text) if known else text.encode()
        is_byte = "ByteFallback" in self._decoder_types and _BYTE_TOKEN.fullmatch(text)
        return bytes.fromhex(text[3:5]) if is_byte else None


def make_tokenizer(name: str, eos: int | str | None = None) -> Tokenizer:
    """Creates the tokenizer for values of `data.tokenizer` and `data.eos`."""
    if name == BYTES:
        return ByteTokenizer(eos)
    return HuggingFaceTokenizer(Path(name).expanduser(), eos)


def _find_eos(
    eos: int | str | None, vocabulary: dict[str, int], added: Collection[str], field: str
) -> int:
    if isinstance(eos, int):
        return eos
    if isinstance(eos, str):
        if eos not in vocabulary:
            raise UserError(f'data.eos = "{eos}" is not a token of {field}')
        return vocabulary[eos]
    # Merges may make one of the names too: those of Qwen2.5 make </s>.
    found = [token for token in _EOS_NAMES if token in added]
    found = found or [token for token in _EOS_NAMES if token in vocabulary]
    if len(found) != 1:
        has = f"has {' and '.join(found)}" if found else f"has none of {', '.join(_EOS_NAMES)}"
        raise UserError(
            f"data.eos is not set, and {field} {has}; set data.eos to the end token or its id"
        )
    return vocabulary[found[0]]
