"""Shows the sequences of training data: `python -m mtraining_jax.cli.inspect_data --help`."""

import functools
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtraining_jax.cli.argument_parser import config_parser, parse_with_overrides, selected_config
from mtraining_jax.cli.model_command import at_least, expanded_path, run_command
from mtraining_jax.data.corpus import Corpus, packs_of, starts_of
from mtraining_jax.data.tokenizer import BYTES, ByteTokenizer, Tokenizer, make_tokenizer
from mtraining_jax.tools.corpus.pack_report import report_on
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.text import counted, print_text

_USAGE = """\
--config NAME [options]

Prints how documents become sequences: their number, the first sequences with the beginning and end
of their documents, and for packed documents (data.mode=pack or data.mask_documents=true) document
lengths, documents per sequence, padding, and how much the attention cost of sequences varies. Data
with label masks is shown in parts, marked + if trained, else -.

  --config NAME    configuration of the run, as in training
  --SECTION.FIELD=VALUE
                   override a field, as in training
  --samples N      number of sequences to show, of each part of a mixture (default: 3)
  --picture FILE   also write a plot of packed documents (needs matplotlib)
  --help [SECTION] print this help, or the fields of a section, and exit
"""
_TOKENS = 16  # shown at each end of a document
_DOCUMENTS = 8  # shown of a sequence
_PICTURE_TYPES = (".png", ".pdf", ".svg", ".jpg")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, or 2 after a user error."""
    return run_command("inspect_data", arguments, lambda: _USAGE, _run)


def _run(arguments: list[str]) -> int:
    parser = config_parser()
    parser.add_argument("--picture", type=expanded_path)
    parser.add_argument("--samples", type=at_least(0), default=3)
    options = parse_with_overrides(parser, arguments)
    if options.picture is not None:
        _check_picture(options.picture)
    config = selected_config(options)
    data, vocab_size, block_size = config.data, config.model.vocab_size, config.sparsity.block_size
    if options.picture is not None and not data.has_documents:
        raise UserError(
            f'--picture draws packed documents, and data.mode = "{data.mode}" without '
            "data.mask_documents does not pack; set data.mode=pack or data.mask_documents=true"
        )
    corpus = data.source_options.open(data, vocab_size)
    tokenizer = corpus.tokenizer
    if tokenizer is None and (data.tokenizer != BYTES or vocab_size == ByteTokenizer().vocab_size):
        tokenizer = make_tokenizer(data.tokenizer, data.eos)
    eos = data.eos if tokenizer is None else tokenizer.eos
    packs = None
    if data.has_documents:
        packs = packs_of(corpus, data, block_size)
        report = report_on(packs, data.seq_len, block_size)
        lines = [f"{data.source}: {corpus.summary}; {packs.summary}", str(report)]
        if options.picture is not None:
            report.draw(str(options.picture))
            lines.append(f"picture: {options.picture}")
        count, pieces = len(packs), packs.pieces
    else:
        starts, block_size = starts_of(corpus, data), 1
        count, pieces = len(starts), functools.partial(_pieces, corpus, starts, data.seq_len, eos)
        found = f"{counted(count, 'sequence')} of {data.seq_len:,} tokens ({data.mode})"
        lines = [f"{data.source}: {corpus.summary}; {found}"]
    parts = getattr(packs, "parts", None) or corpus.parts
    sequences = {"": range(count)} if parts is None else parts.sequences
    for number, part in [
        (x, name) for name, numbers in sequences.items() for x in numbers[: options.samples]
    ]:
        begins, lengths = pieces(number)
        part_suffix = f" of {part}" if part else ""
        lines.append(f"sequence {number}{part_suffix}: {counted(lengths.size, 'document')}")
        position = 0
        for begin, length in zip(begins[:_DOCUMENTS], lengths[:_DOCUMENTS], strict=True):
            positions = begin + np.arange(length)
            ids, what = (
                corpus.stream.take(positions),
                f"{counted(length, 'token')} from {position:,}",
            )
            if corpus.trained is None:
                lines.append(f"  {what}: {_shown(ids, tokenizer, eos, corpus.bos or ())}")
            else:
                lines += _marked(what, ids, corpus.trained(positions), tokenizer, eos)
            position += -(-length // block_size) * block_size
        if lengths.size > _DOCUMENTS:
            lines.append("  ...")
    return print_text("\n".join(lines) + "\n")


def _pieces(
    corpus: Corpus, starts: np.ndarray | range, size: int, eos: Any, number: int
) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths of the documents of a sequence, found by their end tokens."""
    ids = corpus.stream.take(starts[number] + np.arange(size))
    ends = np.union1d(np.flatnonzero(ids == eos) + 1, [size])
    lengths = np.diff(ends, prepend=0)
    return starts[number] + ends - lengths, lengths


def _marked(
    what: str, ids: np.ndarray, trained: np.ndarray, tokenizer: Tokenizer | None, eos: Any
) -> Iterator[str]:
    """Lines of a document and its parts, with + for trained tokens and - for others."""
    yield f"  {what}, {np.count_nonzero(trained):,} trained:"
    cuts = np.flatnonzero(np.diff(trained)) + 1
    parts = zip(np.split(ids, cuts), np.split(trained, cuts), strict=True)
    for part, mask in itertools.islice(parts, _DOCUMENTS):
        text = _shown(part, tokenizer, eos, special=True)
        yield f"    {'+' if mask[0] else '-'} {counted(part.size, 'token')}: {text}"
    if cuts.size >= _DOCUMENTS:
        yield "    ..."


def _shown(
    ids: np.ndarray,
    tokenizer: Tokenizer | None,
    eos: Any,
    bos: tuple[int, ...] = (),
    special: bool = False,
) -> str:
    """The first and the last tokens of a document, as text if possible."""
    begin = "<begin> " if bos and tuple(ids[: len(bos)]) == bos else ""
    text = ids[len(bos) if begin else 0 :]
    text, end = (text[:-1], " <end>") if ids[-1] == eos else (text, "")

    def decoded(part: np.ndarray) -> str:
        found = part.tolist() if tokenizer is None else tokenizer.decode(part, special)
        return json.dumps(found, ensure_ascii=False)

    if text.size <= 2 * _TOKENS:
        return f"{begin}{decoded(text)}{end}"
    return f"{begin}{decoded(text[:_TOKENS])} ... {decoded(text[-_TOKENS:])}{end}"


def _check_picture(path: Path) -> None:
    """Raises UserError if the picture cannot be written, before the data is packed."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"--picture={path} must be a file in an existing folder")
    if path.suffix.lower() not in _PICTURE_TYPES:
        raise UserError(f"--picture={path} must end in one of {', '.join(_PICTURE_TYPES)}")


if __name__ == "__main__":
    sys.exit(main())
