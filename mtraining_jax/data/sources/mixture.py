"""Several sources with weights, mixed sequence by sequence."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Annotated, Any, Literal, cast

import numpy as np

from mtraining_jax.data.corpus import Corpus, one_document_each, packs_of, starts_of
from mtraining_jax.data.packing.packs import PackArrays, Parts
from mtraining_jax.data.source import Source
from mtraining_jax.data.sources import SOURCES
from mtraining_jax.data.sources.token_parts import tokenizer_of
from mtraining_jax.data.sources.tokens import TokenFiles
from mtraining_jax.data.spec import DataSpec
from mtraining_jax.data.stream import TokenStream
from mtraining_jax.data.tokenizer import beginning
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import construct, fields_of, joined, options, toml_value
from mtraining_jax.utils.limits import PositiveFloat, PositiveInt

Tables = Annotated[
    dict[str, dict[str, Any]], SimpleNamespace(words="tables of sources, [data.parts.NAME]")
]


@options(kw_only=True)
class _PartOptions:
    """Options of a part, next to those of its source."""

    weight: PositiveFloat = 1.0
    upsample_tokens: PositiveInt | None = None
    upsample_factor: PositiveInt = 2


@options(kw_only=True)
class Mixture(Source):
    """Parts with weights, each with a source of its own; every sequence belongs to one part."""

    modes = ("concat", "exact", "pack")
    parts: Tables = field(default_factory=dict)
    """Tables [data.parts.NAME], each with source, the options of that source, and weight (1).
    Documents of at least upsample_tokens tokens occur upsample_factor (2) times."""
    weighted_by: Literal["tokens", "documents"] = "tokens"
    """What the weights of parts count."""

    def problems(self, data: DataSpec, vocab_size: int) -> Iterator[str]:
        found = list(super().problems(data, vocab_size))
        if not self.parts:
            found.append('data.source = "mixture" needs parts: add a table [data.parts.NAME]')
        if self.weighted_by == "documents" and not data.has_documents:
            found.append(
                'data.weighted_by = "documents" needs data.mode = "pack" or data.mask_documents = '
                "true"
            )
        for name, table in self.parts.items():
            try:
                part = _Part.read(name, table)
            except UserError as error:
                found += str(error).splitlines()
                continue
            found += map(part.renamed, part.source.problems(part.spec(data), vocab_size))
            if part.options.upsample_tokens and (not data.has_documents or data.mode == "exact"):
                found.append(
                    f"{part.prefix}.upsample_tokens = {part.options.upsample_tokens} needs "
                    'data.mode = "pack", or "concat" with data.mask_documents = true'
                )
        yield from dict.fromkeys(found)

    def has_lengths(self, data: DataSpec) -> bool:
        return all(part.source.has_lengths(part.spec(data)) for part in self._parts())

    @property
    def holds_ids(self) -> bool:
        return all(part.source.holds_ids for part in self._parts())

    def recorded_bos(self) -> tuple[int, ...] | None:
        for part in self._parts() if self.holds_ids else ():
            with part.renaming():
                if (bos := part.source.recorded_bos()) is not None:
                    return bos
        return None

    @property
    def sources(self) -> list[Source]:
        return [part.source for part in self._parts()]

    def open(self, data: DataSpec, vocab_size: int) -> Corpus:
        parts = self._parts()
        corpora = [part.opened(data, vocab_size) for part in parts]
        _check_tokenizers(parts, corpora)
        stream = TokenStream.joined([cast(TokenStream, corpus.stream) for corpus in corpora])
        weights = {part.name: part.options.weight for part in parts}
        texts = [
            f"{weight / sum(weights.values()):.1%} {name} ({of.summary})"
            for (name, weight), of in zip(weights.items(), corpora, strict=True)
        ]
        corpus = Corpus(
            stream,
            max(corpus.vocab_size for corpus in corpora),
            next((x.tokenizer for x in corpora if x.tokenizer is not None), None),
            f"by {self.weighted_by} {', '.join(texts)}",
            trained=stream.trained if stream.masked else None,
            endless=True,
            bos=_common_bos(parts, corpora),
        )
        packed = functools.partial(self._packed, corpora)
        if data.has_documents and data.mode != "exact":
            return dataclasses.replace(corpus, pack=packed)
        whole = packed(data, data.seq_len)
        return dataclasses.replace(corpus, starts=whole.starts, parts=whole.parts)

    def _parts(self) -> list["_Part"]:
        return [_Part.read(name, table) for name, table in self.parts.items()]

    def _packed(self, corpora: list[Corpus], data: DataSpec, block_size: int) -> PackArrays:
        """The sequences of all parts; without documents, each is one document."""
        given, packs, weights, starts, notes, offset = {}, [], [], [], "", 0
        for part, corpus in zip(self._parts(), corpora, strict=True):
            given[part.name] = part.options.weight
            with part.renaming():
                found = part.packs(corpus, data, block_size)
            packs.append(found)
            starts.append(found.starts + offset)
            offset += len(corpus.stream)
            total = found.starts.size if self.weighted_by == "documents" else found.lengths.sum()
            weights.append(part.options.weight * len(found) / float(total))
            notes += f"; {part.name}{found.notes.replace(',', ':', 1)}" if found.notes else ""
        lengths = np.concatenate([x.lengths for x in packs])
        ends = np.cumsum(np.concatenate([np.diff(x.ends, prepend=0) for x in packs]))
        parts = Parts(given, tuple(weights), np.cumsum([len(x) for x in packs]))
        return PackArrays(np.concatenate(starts), lengths, ends, data.seq_len, notes, parts)


@dataclass(frozen=True)
class _Part:
    """A part and its source."""

    name: str
    source: Any
    options: _PartOptions

    @classmethod
    def read(cls, name: str, table: Mapping[str, Any]) -> "_Part":
        """Checks and converts a table; a UserError has a line per problem."""
        prefix, given = f"data.parts.{name}", dict(table)
        if not re.fullmatch(r"[\w-]+", name):
            raise UserError(f"{prefix}: the name of a part must have letters, digits, _ or - only")
        kind = given.pop("source", None)
        if not isinstance(kind, str):
            raise UserError(f"{prefix}.source is missing: it must be {SOURCES.words}")
        try:
            source = SOURCES.get(kind)
        except UserError as error:
            raise UserError(f"{prefix}.source: {error}") from None
        if source is Mixture:
            raise UserError(f'{prefix}.source = "{kind}": a part must have another source')
        own, common = fields_of(source), fields_of(_PartOptions)
        fields, values, problems = own | common, {}, []
        for option, value in given.items():
            if option not in fields:
                problems.append(
                    f'{prefix}.{option} is not an option of a part with source = "{kind}", which '
                    f"has {joined(list(fields), 'and')}"
                )
                continue
            single = list in fields[option].kinds and isinstance(value, str)
            values[option] = [value] if single else value
        made, wrong = construct([_PartOptions, source], values)
        for option, problem in wrong:
            if not option:
                problems.append(f"{prefix}: {problem}")
                continue
            shown = toml_value(values[option]) if option in values else "none"
            problems.append(f"{prefix}.{option} = {shown} must be {fields[option].allowed}")
        if problems:
            raise UserError("\n".join(problems))
        options, source = made
        return cls(name, source, options)

    def spec(self, data: Any) -> Any:
        """`[data]` with this source."""
        return dataclasses.replace(data, source_options=self.source)

    @property
    def prefix(self) -> str:
        return f"data.parts.{self.name}"

    def renamed(self, problem: str) -> str:
        """Renames `data.paths` to `data.parts.NAME.paths`, and so on, in a message."""
        names = "|".join(["source", *fields_of(type(self.source))])
        return re.sub(rf"(?<![\w.])data\.({names})\b", rf"{self.prefix}.\1", problem)

    @contextlib.contextmanager
    def renaming(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            raise UserError(self.renamed(str(error))) from error

    def packs(self, corpus: Corpus, data: DataSpec, block_size: int) -> PackArrays:
        spec, options = self.spec(data), self.options
        if not data.has_documents:
            return one_document_each(starts_of(corpus, spec), data.seq_len)
        if options.upsample_tokens is not None and corpus.pack is not None:
            upsample = options.upsample_tokens, options.upsample_factor
            pack = functools.partial(corpus.pack, upsample=upsample)
            corpus = dataclasses.replace(corpus, pack=pack)
        return cast(PackArrays, packs_of(corpus, spec, block_size))

    def opened(self, data: DataSpec, vocab_size: int) -> Corpus:
        spec = self.spec(data)
        with self.renaming():
            corpus = self.source.open(spec, vocab_size)
        if not isinstance(corpus.stream, TokenStream):
            raise UserError(
                f'{self.prefix}.source = "{spec.source}" generates its data and cannot be a '
                "part of a mixture"
            )
        return corpus


def _common_bos(parts: list[_Part], corpora: list[Corpus]) -> tuple[int, ...] | None:
    """The ids that begin the documents of all parts, if known."""
    found = {
        x.bos: part.prefix for part, x in zip(parts, corpora, strict=True) if x.bos is not None
    }
    if len(found) > 1:
        differ = " and ".join(f"of {part} begin {beginning(bos)}" for bos, part in found.items())
        raise UserError(f"the documents {differ}; tokenize all with the same data.bos")
    return next(iter(found), None)


def _check_tokenizers(parts: list[_Part], corpora: list[Corpus]) -> None:
    """Rejects token files that were made with another tokenizer than the rest, if known."""
    found: dict[str | int, str] = {}
    for part, corpus in zip(parts, corpora, strict=True):
        if corpus.tokenizer is not None:
            known = {(corpus.tokenizer.name, corpus.tokenizer.checksum)}
        elif isinstance(part.source, TokenFiles):
            known = {tokenizer_of(folder) for folder in {x.parent for x in part.source.files()}}
        else:
            continue
        for name, checksum in filter(None, known):
            found.setdefault(name if checksum is None else checksum, f'{part.prefix} has "{name}"')
    if len(found) > 1:
        raise UserError(
            f"the parts have tokens of different tokenizers: {' and '.join(found.values())}; "
            "tokenize all with the same data.tokenizer"
        )
