"""Tokenizers: raw bytes, or a Hugging Face ``tokenizer.json``."""

import functools
import itertools
import json
import re
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import tokenizers.pre_tokenizers
import tokenizers.processors

from mtraining_jax.data.files import errors_as, reason
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import toml_value
from mtraining_jax.utils.file_limits import LARGEST_TOKENIZER, absence, check_size, read_json
from mtraining_jax.utils.hub import local_folder

# End tokens of common model families. Unless a vocabulary has exactly one of them,
# tokenizer_config.json must name the end token.
_EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>")

# Settings of tokenizer_config.json that transformers adds first, in this order.
_SPECIAL = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]

BYTES = "bytes"  # the value of data.tokenizer that is not a file
Bos = int | str | bool | None  # the value of data.bos; false, a token, or the tokenizer's default

_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


def _byte_alphabet() -> dict[str, int]:
    """The byte of each character of byte-level tokens: printable ones of Latin-1 are themselves."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    found = {x: ord(x) for x in alphabet if ord(x) < 256}
    others = (byte for byte in range(256) if chr(byte) not in found)
    return found | dict(zip(alphabet[len(found) :], others, strict=True))


_BYTES = _byte_alphabet()


class Tokenizer:
    """Base class of tokenizers with ids below `vocab_size`.

    Texts begin with the ids `bos`, usually one or none, and with `usual_bos` if data.bos is unset;
    `eos` ends documents. `checksum` identifies the files, None without.
    """

    checksum: int | None = None
    usual_bos: tuple[int, ...] = ()

    def __init__(self, name: str, vocab_size: int, eos: int, bos: tuple[int, ...] = ()) -> None:
        if not 0 <= eos < vocab_size:
            raise UserError(
                f"data.eos = {eos} must be from 0 to {vocab_size - 1}, the ids of data.tokenizer = "
                f'"{name}"'
            )
        self.name, self.vocab_size, self.eos, self.bos = name, vocab_size, eos, bos

    @property
    def bos_token(self) -> int | None:
        """The token that the tokenizer's settings name, whether or not texts begin with it."""
        return None

    @property
    def beginning(self) -> str:
        """How texts begin, for messages: "with <s> (1)"."""
        shown = self.decode(np.array(self.bos), special=True) if self.bos else ""
        return beginning(self.bos, f"{shown} ")

    def encode(self, text: str, bos: bool = True) -> np.ndarray:
        """Token ids of a text, integers [n], which begin with `self.bos` unless `bos` is false.

        Without `bos`, for a text that states it, as chat templates do, or a part of a text.
        """
        raise NotImplementedError(f"{type(self).__name__}.encode")

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

    def __init__(self, eos: int | str | None = None, bos: Bos = None) -> None:
        if bos is not None and bos is not False:
            raise UserError(
                f'data.bos = {toml_value(bos)} must be false or none: data.tokenizer = "bytes" has '
                "no beginning-of-sequence token"
            )
        if isinstance(eos, str):
            raise UserError(
                f'data.eos = "{eos}" must be an id from 0 to 256: data.tokenizer = "bytes" has no '
                "named tokens"
            )
        super().__init__(BYTES, 257, 256 if eos is None else eos)

    def encode(self, text: str, bos: bool = True) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def decode(self, ids: np.ndarray, special: bool = False) -> str:
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes | None:
        return bytes([token]) if token < 256 else b""


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json``, with the tokens that the ``tokenizer_config.json`` next to it adds.

    `encode` gives the ids of transformers' `AutoTokenizer`, which also begins texts as the
    post-processor of the file says; add_bos_token of tokenizer_config.json has no effect there.
    Deliberately different: an end token that the post-processor appends is ignored, since a prompt
    continues and documents end with `eos`. Normalizer and pre-tokenizer are those of the file,
    which transformers replaces for a few classes.

    Args:
        eos, bos: values of `data.eos` and `data.bos`.
    """

    def __init__(self, path: str | Path, eos: int | str | None = None, bos: Bos = None) -> None:
        self.name = str(path)
        field = f'data.tokenizer = "{path}"'
        if (inside := Path(path) / "tokenizer.json").is_file():
            raise UserError(f'{field} is a folder; use "{inside}"')
        if not Path(path).is_file():
            why = absence(path) or "is not a file"
            raise UserError(f'{field} {why}; it must be "bytes" or the path of a tokenizer.json')
        check_size(path, LARGEST_TOKENIZER)
        # The library raises bare Exception.
        with errors_as(UserError, f"{field} is not a tokenizer.json", Exception):
            content = Path(path).read_bytes()
            self._backend = tokenizers.Tokenizer.from_buffer(content)
        self._backend.no_truncation()
        self._backend.no_padding()
        with errors_as(UserError, f"{self.settings_file} has tokens that are not valid", Exception):
            added = self._add_tokens()
        self.checksum = zlib.crc32(added.encode(), zlib.crc32(content))
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError(f"{field} has an empty vocabulary")
        # Ids may have gaps.
        vocab_size = max(vocabulary.values()) + 1
        contents = {token.content for token in self.added_tokens.values()}
        named = self.special_tokens.get("eos_token")
        eos = _find_eos(eos, vocabulary, contents, named, field)
        if (processor := self._backend.post_processor) is not None:
            self.usual_bos = _first_ids(json.loads(processor.__getstate__()))
        super().__init__(str(path), vocab_size, eos, self._find_bos(bos, vocabulary, field))

    def _add_tokens(self) -> str:
        """Applies tokenizer_config.json, and returns what it changes: tokens not in the file."""
        settings, known = self.settings, self.added_tokens.values()
        listed = sorted(settings.get("added_tokens_decoder", {}).items(), key=lambda x: int(x[0]))
        tokens = [tokenizers.AddedToken(**token) for _, token in listed]
        tokens = [x for x in tokens if repr(x) not in set(map(repr, known))]
        contents = {token.content for token in [*known, *tokens]}
        usual = {name: settings.get(name) for name in _SPECIAL}
        named = usual | {name: x for name, x in settings.items() if name.endswith("_token")}
        more = settings.get("extra_special_tokens") or settings.get("additional_special_tokens")
        for token in [*named.values(), *(more.values() if isinstance(more, dict) else more or ())]:
            token = {"content": token} if isinstance(token, str) else token
            if isinstance(token, dict) and token["content"] not in contents:
                flags: dict[str, Any] = {**token, "special": True}
                flags.pop("__type", None)
                tokens.append(tokenizers.AddedToken(**flags))
                contents.add(token["content"])
        self._backend.add_tokens(tokens)
        self._backend.encode_special_tokens = bool(settings.get("split_special_tokens"))
        is_gpt2 = str(settings.get("tokenizer_class")).startswith("GPT2Tokenizer")
        prefix = is_gpt2 and bool(settings.get("add_prefix_space"))
        if prefix and hasattr(self._backend.pre_tokenizer, "add_prefix_space"):
            self._backend.pre_tokenizer.add_prefix_space = True
        changes = tokens, self._backend.encode_special_tokens, prefix
        return repr(changes) if any(changes) else ""

    def _find_bos(self, bos: Bos, vocabulary: Mapping[str, int], field: str) -> tuple[int, ...]:
        if bos is None:
            return self.usual_bos
        if isinstance(bos, str) and bos not in vocabulary:
            raise UserError(f'data.bos = "{bos}" is not a token of {field}')
        found = vocabulary[bos] if isinstance(bos, str) else bos
        if found is not False and found not in vocabulary.values():
            raise UserError(f"data.bos = {toml_value(bos)} is not the id of a token of {field}")
        return () if found is False else (found,)

    def encode(self, text: str, bos: bool = True) -> np.ndarray:
        return np.array([*(self.bos if bos else ()), *self._encoding(text).ids], np.uint32)

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids without bos, and where their characters begin and end, integers [n]."""
        encoding = self._encoding(text)
        begins, ends = np.asarray(encoding.offsets, np.int64).reshape(-1, 2).T
        return np.asarray(encoding.ids, np.uint32), begins, ends

    def _encoding(self, text: str) -> tokenizers.Encoding:
        try:
            return self._backend.encode(text, add_special_tokens=False)
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
        """The tokenizer_config.json next to the file, and special_tokens_map.json, if any.

        As in transformers, the second one counts only if the first has no added_tokens_decoder.
        """
        found = _settings_in(self.settings_file)
        if "added_tokens_decoder" in found:
            return found
        return found | _settings_in(self.settings_file.with_name("special_tokens_map.json"))

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

    def with_bos(self) -> dict[str, Any]:
        """The contents of a tokenizer.json whose post-processor begins texts with `bos`."""
        names = [self._backend.id_to_token(x) for x in self.bos]
        processor = tokenizers.processors.TemplateProcessing(
            single=[*names, "$A"], special_tokens=list(zip(names, self.bos, strict=True))
        )
        template = json.loads(processor.__getstate__())
        return {**read_json(Path(self.name), LARGEST_TOKENIZER), "post_processor": template}

    @property
    def bos_token(self) -> int | None:
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


def make_tokenizer(name: str, eos: int | str | None = None, bos: Bos = None) -> Tokenizer:
    """Creates the tokenizer for values of `data.tokenizer`, `data.eos` and `data.bos`."""
    if name == BYTES:
        return ByteTokenizer(eos, bos)
    return HuggingFaceTokenizer(local_folder(name), eos, bos)


def beginning(bos: tuple[int, ...], text: str = "") -> str:
    """How texts with these ids begin, and the text of the ids, for messages."""
    ids = " ".join(map(str, bos))
    return f"with {text}({ids})" if bos else "without a beginning-of-sequence token"


def _settings_in(path: Path) -> dict[str, Any]:
    """The fields of a JSON file, none if it does not exist."""
    if not path.exists():
        return {}
    with errors_as(UserError, f"{path} cannot be read", Exception):
        return dict(read_json(path))


def _first_ids(processor: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that a post-processor puts before a text."""
    match processor:
        case {"type": "Sequence", "processors": parts}:
            return tuple(id for part in reversed(parts) for id in _first_ids(part))
        case {"type": "TemplateProcessing", "single": pieces, "special_tokens": known}:
            names = itertools.takewhile(lambda piece: "SpecialToken" in piece, pieces)
            return tuple(x for name in names for x in known[name["SpecialToken"]["id"]]["ids"])
        case {"type": "BertProcessing" | "RobertaProcessing", "cls": (_, id)}:
            return (id,)
    return ()


def _find_eos(
    eos: int | str | None,
    vocabulary: dict[str, int],
    added: Collection[str],
    named: str | None,
    field: str,
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
    if len(found) != 1 and named in vocabulary:
        return vocabulary[named]
    if len(found) != 1:
        has = f"has {' and '.join(found)}" if found else f"has none of {', '.join(_EOS_NAMES)}"
        raise UserError(
            f"data.eos is not set, and {field} {has}; set data.eos to the end token or its id, or "
            "name it as eos_token in the tokenizer_config.json next to the file"
        )
    return vocabulary[found[0]]
