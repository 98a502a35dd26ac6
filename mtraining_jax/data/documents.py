"""Base class of sources of documents, which become sequences by `data.mode`."""

import functools
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import tokenizers

from mtraining_jax.data.chat.conversation import Conversation, read_conversation
from mtraining_jax.data.chat.template import chat_template
from mtraining_jax.data.corpus import Corpus, check_some_exact
from mtraining_jax.data.files import find_files
from mtraining_jax.data.masked import Completion, MaskedText, MaskedTokens, label_mask
from mtraining_jax.data.packing.packs import pack_documents
from mtraining_jax.data.source import FileSource, Source, id_problems
from mtraining_jax.data.sources.token_parts import BOS, TOKENIZER
from mtraining_jax.data.spec import DataSpec
from mtraining_jax.data.stream import TokenStream, Vocab
from mtraining_jax.data.token_cache import key_of, tokenized
from mtraining_jax.data.tokenizer import BYTES, Bos, Tokenizer, make_tokenizer
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import options, shortened, toml_value
from mtraining_jax.utils.hub import HUB, downloaded
from mtraining_jax.utils.invocation import command_of
from mtraining_jax.utils.limits import Text
from mtraining_jax.utils.text import counted

# Bytes that take minutes: a tokenizer processes a few MB/s.
LARGE = 2**28

# Text or token ids [n], both trained everywhere, or with a label mask.
Document = str | np.ndarray | MaskedTokens | MaskedText | Conversation


@options(kw_only=True)
class DocumentSource(Source):
    """A source that yields documents, which one process of a host tokenizes at startup.

    Texts begin as `data.bos` says, and documents end with eos, except in mode ``exact``, which
    keeps those of `seq_len` tokens.
    """

    modes: ClassVar[tuple[str, ...]] = ("concat", "exact", "pack")

    def documents(self) -> Iterator[tuple[str, Document]]:
        """Yields the location and the content of each document."""
        raise NotImplementedError(f"{type(self).__name__}.documents")

    @property
    def holds_ids(self) -> bool:
        return False

    def problems(self, data: DataSpec, vocab_size: int) -> Iterator[str]:
        yield from super().problems(data, vocab_size)
        if self.holds_ids:
            yield from id_problems(data, "eos", "bos")
        elif data.tokenizer == BYTES:  # others are files, which are read later
            named_eos = data.eos if isinstance(data.eos, str) else None
            try:
                make_encoder(BYTES, named_eos, data.bos, vocab_size)
            except UserError as error:
                yield str(error)

    def inputs(self) -> list[Path] | None:
        """All files that determine the documents, or None if unknown.

        If they are known, one process of a host reads the documents for all of them.
        """
        return self.files() if isinstance(self, FileSource) else None

    def open(self, data: DataSpec, vocab_size: int) -> Corpus:
        exact = data.mode == "exact"
        tokenizer = None if self.holds_ids else data.tokenizer
        encoder = make_encoder(tokenizer, data.eos, data.bos, vocab_size)

        def encoded() -> Iterator[MaskedTokens]:
            for where, document in self.documents():
                yield encoder.encode(document, where, with_eos=not exact)

        name = f'data.source = "{data.source}"'
        if isinstance(self, FileSource):
            name += f" (data.paths = {shortened(toml_value(self.paths), 200)})"
        kept = data.seq_len if exact else None
        key = self._key(data, encoder)
        part, lengths, notes = tokenized(encoded, encoder.dtype, name, key, kept)
        if exact:
            check_some_exact(lengths, data)
        stream = TokenStream([part], encoder.vocab)
        summary = f"{counted(lengths.size, 'document')}, {stream.summary}{noted(notes)}"
        bos = None if self.is_chat else encoder.bos
        if encoder.tokenizer is not None and bos is not None:
            summary += f", documents begin {encoder.tokenizer.beginning}"
        pack = functools.partial(pack_documents, lengths, stream)
        trained = stream.trained if stream.masked else None
        vocabulary = encoder.vocab_size, encoder.tokenizer
        return Corpus(stream, *vocabulary, summary, pack=pack, trained=trained, bos=bos)

    def _key(self, data: DataSpec, encoder: "Encoder") -> str | None:
        """Changes with any option, file or code that determines the token ids."""
        modules = [sys.modules[cls.__module__] for cls in type(self).__mro__ if cls is not object]
        code = [getattr(module, "__file__", None) or "" for module in modules]
        if (files := self.inputs()) is None or not all(code):
            return None
        code += sorted(map(str, Path(__file__).parent.rglob("*.py")))
        kept = data.seq_len if data.mode == "exact" else None
        options = identity_of(data, encoder), encoder.vocab_size, kept, tokenizers.__version__
        return key_of([*files, *map(Path, code)], str(type(self)), *options)


def noted(notes: Mapping[str, int]) -> str:
    """Numbers of documents with a note, for a summary."""
    return "".join(f", {number:,} {note}" for note, number in notes.items() if note)


_EMPTY = MaskedTokens(np.zeros(0, np.int64), note="without content (empty or null) skipped")


@options(kw_only=True)
class TableSource(FileSource, DocumentSource):
    """Files with a field or column of text, token ids or messages.

    Documents that are empty, or null in a column other than the tools, are skipped and counted.
    """

    text_field: Text = "text"
    """JSONL field or table column with the text."""
    prompt_field: Text | None = None
    """Field or column with a prompt for the text; prompts are not trained."""
    token_field: Text | None = None
    """Field or column with token ids, used instead of text_field."""
    mask_field: Text | None = None
    """Field or column with 0 or 1 for each token id, whether it is trained; or with labels as in
    Hugging Face data sets, -100 or the id."""
    messages_field: Text | None = None
    """Field or column with the messages of a conversation, used instead of text_field. The
    tokenizer's chat template renders them; answers are trained."""
    tools_field: Text = "tools"
    """Field or column with the tools of a conversation; may be missing."""

    def problems(self, data: DataSpec, vocab_size: int) -> Iterator[str]:
        yield from super().problems(data, vocab_size)
        if self.prompt_field and self.holds_ids:
            yield (
                f'data.prompt_field = "{self.prompt_field}" is for text; for token ids set '
                "data.mask_field instead"
            )
        if self.mask_field and not self.holds_ids:
            yield (
                f'data.mask_field = "{self.mask_field}" is for token ids: set data.token_field, or '
                "data.prompt_field for text"
            )
        if self.messages_field:
            shown = f'data.messages_field = "{self.messages_field}"'
            for name in ("prompt_field", "token_field", "mask_field"):
                if (column := getattr(self, name)) is not None:
                    yield f'{shown} excludes data.{name} = "{column}"; remove one of them'
            if data.tokenizer == BYTES:
                yield (
                    f'{shown} needs a chat template, which data.tokenizer = "{BYTES}" lacks; use '
                    "the tokenizer.json of a folder with one"
                )

    def files(self) -> list[Path]:
        paths = (str(downloaded(x)) if x.startswith(HUB) else x for x in self.paths)
        return find_files(list(paths), self.suffixes)

    @property
    def holds_ids(self) -> bool:
        return self.token_field is not None

    @property
    def is_chat(self) -> bool:
        return self.messages_field is not None

    @property
    def columns(self) -> dict[str, str]:
        """The columns to read, by option: the content, and its prompt, mask or tools, if any."""
        if self.messages_field:
            return {"messages_field": self.messages_field, "tools_field": self.tools_field}
        names = ("token_field", "mask_field") if self.holds_ids else ("text_field", "prompt_field")
        return {name: column for name in names if (column := getattr(self, name)) is not None}

    def columns_in(self, names: Collection[str], where: str) -> dict[str, str]:
        """`columns` for a file with these names, which may lack tools but have no name twice."""
        lacks_tools = self.messages_field and self.tools_field not in names
        found = {k: x for k, x in self.columns.items() if not (lacks_tools and k == "tools_field")}
        for option, column in found.items():
            if (count := list(names).count(column)) > 1:
                raise UserError(
                    f"{where} has {count} columns with the name of {self.shown(option)}; rename "
                    "all but one of them"
                )
        return found

    def shown(self, name: str) -> str:
        """An option and its column, for messages."""
        return f'data.{name} = "{self.columns[name]}"'

    def document(self, values: Sequence[Any], where: str) -> Document:
        """The document with these values of `columns_in`, None for null; the ids are an array.

        A document without content is counted, and has no tokens.
        """
        required = values[:1] if self.messages_field else values
        empty = [isinstance(x, str | list | np.ndarray) and not len(x) for x in required]
        if all(empty) or any(value is None for value in required):
            return _EMPTY
        match list(self.columns), values:
            case [_], [content]:
                return content
            case ["messages_field", _], [messages, *tools]:
                return read_conversation(messages, tools[0] if tools else None, where)
            case [_, "prompt_field"], [text, prompt]:
                return Completion(prompt, text)
            case _, [ids, mask]:
                return MaskedTokens(ids, label_mask(mask, ids, where, self.shown("mask_field")))
        raise ValueError(values)


@dataclass(frozen=True)
class Encoder:
    """Turns documents into token ids of type `dtype`, which end with `eos`, if any."""

    tokenizer: Tokenizer | None  # None for documents of token ids
    eos: int | None
    vocab_size: int  # of the model or the tokenizer, the smaller one

    @property
    def vocab(self) -> Vocab:
        origin = "model.vocab_size"
        if self.tokenizer is not None and self.vocab_size == self.tokenizer.vocab_size:
            origin = f"the tokenizer {self.tokenizer.name}"
        return Vocab(self.vocab_size, origin)

    @property
    def bos(self) -> tuple[int, ...] | None:
        """The ids that begin texts; None for token ids and bytes."""
        if self.tokenizer is None or self.tokenizer.name == BYTES:
            return None
        return self.tokenizer.bos

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)

    def encode(self, document: Document, where: str, with_eos: bool = True) -> MaskedTokens:
        """The ids [n] of a document and its mask, if any.

        Texts begin with the tokenizer's bos unless they are empty. Appends eos unless the document
        is empty, consists of ids that end with eos, or is a conversation, which begins and ends as
        its template says. The appended eos is trained if the last token is.
        """
        is_text = False
        if isinstance(document, MaskedTokens):
            tokens = document
        elif isinstance(document, np.ndarray) or self.tokenizer is None:
            tokens = MaskedTokens(np.asarray(document))
        else:
            is_text = True
            try:
                if isinstance(document, str):
                    tokens = MaskedTokens(self.tokenizer.encode(document))
                elif isinstance(document, Conversation):
                    with_eos, tokens = False, chat_template(self.tokenizer).encode(document)
                else:
                    tokens = document.tokens(self.tokenizer)
            except (UnicodeEncodeError, TypeError) as error:
                # JSON can contain unpaired surrogates, which cannot be encoded.
                raise UserError(f"{where} has text that is not valid Unicode") from error
            has_bos = not isinstance(document, Conversation)
            if has_bos and tokens.ids.size == len(self.tokenizer.bos):  # no text
                mask = None if tokens.trained is None else tokens.trained[:0]
                tokens = MaskedTokens(tokens.ids[:0], mask)
        self.vocab.check(tokens.ids, where, range(tokens.ids.size))
        ids, trained = tokens.ids.astype(self.dtype), tokens.trained
        given = not is_text and ids.size > 0 and ids[-1] == self.eos
        if with_eos and ids.size and self.eos is not None and not given:
            ids = np.append(ids, self.dtype.type(self.eos))
            trained = None if trained is None else np.append(trained, trained[-1])
        return MaskedTokens(ids, trained, tokens.note)


def make_encoder(
    tokenizer: str | None, eos: int | str | None, bos: Bos, vocab_size: int
) -> Encoder:
    """The encoder for values of `data.tokenizer`, None for token ids, `data.eos` and `data.bos`."""
    if tokenizer is None:
        eos = eos if isinstance(eos, int) else None  # `id_problems` rejects strings
        return Encoder(None, eos, vocab_size)
    loaded = make_tokenizer(tokenizer, eos, bos)
    check_ends(loaded, vocab_size)
    return Encoder(loaded, loaded.eos, min(loaded.vocab_size, vocab_size))


def check_ends(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises UserError if a token that begins or ends texts is outside of a model's vocabulary.

    Tokenizers may have ids that the model lacks, as those of Gemma 3 do; texts rarely have them.
    """
    for name, ids in (("data.eos", (tokenizer.eos,)), ("data.bos", tokenizer.bos)):
        if ids and max(ids) >= vocab_size:
            raise UserError(
                f'{name} = {max(ids)} of data.tokenizer = "{tokenizer.name}" is outside the '
                f"vocabulary: model.vocab_size = {vocab_size}"
            )


def identity_of(data: DataSpec, encoder: Encoder) -> dict[str, Any]:
    """The options of `[data]` that determine the token ids of documents, by name."""
    tokenizer, bos, chat = (None, None), encoder.bos, {}
    if encoder.tokenizer is not None:
        tokenizer = data.tokenizer, encoder.tokenizer.checksum
        if data.source_options.is_chat:
            bos = None  # templates state it
            chat = {"checksum of the chat template": chat_template(encoder.tokenizer).checksum}
    return {
        **chat,
        "data.source": data.source,
        **{f"data.{name}": value for name, value in asdict(data.source_options).items()},
        **dict(zip(TOKENIZER, tokenizer, strict=True)),
        "data.eos": encoder.eos,
        BOS: None if bos is None else list(bos),
        "type of ids": encoder.dtype.name,
    }


def pretokenize_hint(data: DataSpec) -> str | None:
    """A hint to pre-tokenize a large corpus, which otherwise is tokenized at startup."""
    source = data.source_options
    if not isinstance(source, DocumentSource) or not isinstance(source, FileSource):
        return None
    size = source.size()
    if size <= LARGE:
        return None
    what = "copies" if source.holds_ids else "tokenizes"
    return (
        f"one process of each host {what} data.paths ({size / 2**20:,.0f} MiB) at startup; to "
        f"pre-tokenize it, see {command_of('tokenize_corpus')} --help"
    )
