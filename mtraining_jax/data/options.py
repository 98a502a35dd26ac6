"""What a loader is asked for: the fields of the ``data`` section, checked on their own."""

from dataclasses import dataclass
from typing import Protocol

from mtraining_jax.errors import UserError

SOURCES = ("python_stdlib", "synthetic", "text", "jsonl", "parquet", "tokens")
MODES = ("concat", "exact")
TOKEN_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")


class DataOptionsLike(Protocol):
    """Any object with these read-only attributes configures a loader; see `DataOptions`."""

    source: str
    paths: tuple[str, ...]
    text_field: str
    token_field: str | None
    tokenizer: str
    seq_len: int
    batch_size: int
    mode: str
    shuffle: bool
    seed: int
    token_dtype: str
    eos: int | str | None


@dataclass(frozen=True)
class DataOptions:
    """The fields of the ``data`` section with their defaults."""

    source: str = "python_stdlib"  # one of SOURCES
    paths: tuple[str, ...] = ()  # files, folders or globs; unused by python_stdlib and synthetic
    text_field: str = "text"  # jsonl, parquet: the field that holds the text
    token_field: str | None = None  # parquet: a list-of-integers column, read instead of text
    tokenizer: str = "bytes"  # "bytes" or the path of a Hugging Face tokenizer.json
    seq_len: int = 4096  # tokens a sequence
    batch_size: int = 1  # sequences a global batch
    mode: str = "concat"  # one of MODES
    shuffle: bool = True  # a new order of the sequences each epoch
    seed: int = 0  # of the shuffle, 0 to 2**32 - 1
    token_dtype: str = "uint16"  # of .bin files, which carry no type of their own
    eos: int | str | None = None  # end-of-document id, or its text in the tokenizer


def check_options(options: DataOptionsLike) -> None:
    """Stops on a value that no data can satisfy.

    Args:
      options: the ``data`` section.

    Raises:
      UserError: naming the field, its value and what is allowed.
    """
    for field, allowed in (("source", SOURCES), ("mode", MODES), ("token_dtype", TOKEN_DTYPES)):
        value = getattr(options, field)
        if value not in allowed:
            raise UserError(f"data.{field} is {value!r}; it must be one of {', '.join(allowed)}.")
    # Two tokens are the least that have one to predict from the other.
    for field, least in (("seq_len", 2), ("batch_size", 1)):
        value = getattr(options, field)
        if value < least:
            raise UserError(f"data.{field} is {value}; it must be at least {least}.")
    if not 0 <= options.seed < 2**32:
        raise UserError(f"data.seed is {options.seed}; it must be from 0 to 2**32 - 1.")
    if options.source not in ("python_stdlib", "synthetic") and not options.paths:
        raise UserError(
            f"data.paths is empty; source {options.source!r} needs a file, a folder or a glob."
        )
    if options.source == "python_stdlib" and options.paths:
        raise UserError(
            "data.paths must be empty for source 'python_stdlib', which finds its own files;"
            " use source 'text' to read these paths."
        )
    if options.source == "synthetic" and options.paths:
        raise UserError("data.paths must be empty for source 'synthetic', which reads no file.")
    if options.source == "synthetic" and options.mode != "concat":
        raise UserError(
            f"data.mode is {options.mode!r}; source 'synthetic' has documents of many lengths and"
            " needs 'concat'."
        )
