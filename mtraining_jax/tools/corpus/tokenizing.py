"""Pre-tokenizes the documents of a source into token files, in parallel processes."""

import functools
import multiprocessing
import os
import signal
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mtraining_jax.data.documents import Document, DocumentSource, identity_of, make_encoder, noted
from mtraining_jax.data.masked import joined
from mtraining_jax.data.source import FileSource
from mtraining_jax.data.sources.token_parts import (
    PartRecord,
    close_folder,
    mark_incomplete,
    open_folder,
    read_record,
    write_part,
)
from mtraining_jax.data.spec import DataSpec
from mtraining_jax.data.tokenizer import Bos
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.text import counted

# Bytes of documents per part; a process holds two parts and their tokens.
PART_BYTES = 2**25
_Documents = list[tuple[str, Document]]
_EncoderArgs = tuple[str | None, int | str | None, Bos, int]  # of `make_encoder`


@dataclass
class Totals:
    """Content of a folder of token files; `found` counts the parts that already existed."""

    parts: int = 0
    documents: int = 0
    tokens: int = 0
    trained: int = 0
    found: int = 0
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, record: PartRecord, found: bool = False) -> None:
        self.parts += 1
        self.documents += record.documents
        self.tokens += record.tokens
        self.trained += record.tokens if record.trained is None else record.trained
        self.found += found
        self.notes.update(record.notes)

    def __str__(self) -> str:
        documents, parts = counted(self.documents, "document"), counted(self.parts, "part")
        trained = f" ({self.trained:,} trained)" if self.trained < self.tokens else ""
        return f"{documents}, {self.tokens:,} tokens{trained} in {parts}{noted(self.notes)}"


def tokenize_corpus(
    data: DataSpec,
    vocab_size: int,
    folder: Path,
    processes: int,
    report: Callable[[Totals, int], None] = lambda totals, read: None,
    part_bytes: int = PART_BYTES,  # minimum bytes of documents per part
) -> Totals:
    """Writes the token files of a source; skips parts that already exist.

    One process reads the documents, the others tokenize them. The files are deterministic, with any
    number of processes and interruptions.

    Args:
        data: options, already validated; uses source, tokenizer, eos and bos.
        report: callback with the totals so far and the bytes of documents read.
    """
    source = data.source_options
    if not isinstance(source, DocumentSource):
        raise UserError(f'data.source = "{data.source}" has no documents to tokenize')
    if isinstance(source, FileSource):
        source.files()  # raises before the folder is made
    args = None if source.holds_ids else data.tokenizer, data.eos, data.bos, vocab_size
    identity = identity_of(data, make_encoder(*args)) | {"bytes of a part": part_bytes}
    open_folder(folder, identity)
    totals, read = Totals(), 0
    # Forked processes would lack the threads of the tokenizer library.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, initializer=_prepare_worker)
    running: deque[Future[PartRecord]] = deque()
    try:
        for number, (documents, checksum, size) in enumerate(parts(source, part_bytes)):
            read += size
            record = read_record(folder, number)
            if record is not None and record.checksum == checksum:
                totals.add(record, found=True)
            else:
                mark_incomplete(folder)
                running.append(pool.submit(_make_part, args, folder, number, documents, checksum))
            if len(running) > 2 * processes:
                totals.add(running.popleft().result())
            report(totals, read)
        while running:
            totals.add(running.popleft().result())
            report(totals, read)
    except BrokenProcessPool as error:
        raise UserError(
            "a tokenizer process was killed, possibly out of memory; run the same command again to "
            "resume, with fewer --processes to use less memory"
        ) from error
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror})") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    if totals.tokens > 0 and not totals.trained:
        raise UserError(
            f'no token of data.source = "{data.source}" is trained: its label mask is 0 everywhere'
        )
    if totals.tokens == 0:
        raise UserError(f'data.source = "{data.source}" has no documents with tokens')
    close_folder(folder, totals.parts, {"documents": totals.documents, "tokens": totals.tokens})
    return totals


def parts(source: DocumentSource, part_bytes: int) -> Iterator[tuple[_Documents, int, int]]:
    """Yields the documents of each part with their locations, their checksum, and their bytes."""
    documents: _Documents = []
    checksum = size = 0
    for where, document in source.documents():
        if isinstance(document, str):
            # `Encoder` reports unpaired surrogates.
            content = document.encode("utf-8", "surrogatepass")
        elif isinstance(document, np.ndarray):
            content = document.tobytes()
        else:
            content = document.content
        # Not before an empty document: files of parts cannot be empty.
        if size >= part_bytes and content:
            yield documents, checksum, size
            documents, checksum, size = [], 0, 0
        # Includes the length, to detect text that moves between documents.
        checksum = zlib.crc32(content, zlib.crc32(len(content).to_bytes(8, "little"), checksum))
        size += len(content)
        documents.append((where, document))
    if documents:
        yield documents, checksum, size


def _prepare_worker() -> None:
    # Ctrl-C is for the parent, which waits for running parts.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


_worker_encoder = functools.cache(make_encoder)


def _make_part(
    args: _EncoderArgs, folder: Path, number: int, documents: _Documents, checksum: int
) -> PartRecord:
    encoder = _worker_encoder(*args)
    pieces = [encoder.encode(document, where) for where, document in documents]
    lengths = np.array([tokens.ids.size for tokens in pieces], np.int64)
    notes = Counter(tokens.note for tokens in pieces if tokens.note)
    return write_part(folder, number, joined(pieces), lengths, checksum, notes)
