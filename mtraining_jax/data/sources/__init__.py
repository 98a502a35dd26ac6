"""Registry of built-in data sources."""

from collections.abc import Iterator

from mtraining_jax.data.spec import DataSpec
from mtraining_jax.utils.plugins import Registry

_HERE = "mtraining_jax.data.sources"

SOURCES = Registry(
    "data source",
    base="mtraining_jax.data.source:Source",
    built_in={
        "python_stdlib": f"{_HERE}.python_stdlib:PythonStdlib",
        "synthetic": f"{_HERE}.synthetic:Synthetic",
        "text": f"{_HERE}.text:TextFiles",
        "jsonl": f"{_HERE}.jsonl:JsonLines",
        "parquet": f"{_HERE}.parquet:Parquet",
        "hf_disk": f"{_HERE}.hf_disk:HuggingFaceOnDisk",
        "mds": f"{_HERE}.mds:MosaicShards",
        "tokens": f"{_HERE}.tokens:TokenFiles",
    },
)


def problems(data: DataSpec, vocab_size: int) -> Iterator[str]:
    """Validates the section without opening files; yields one message per problem."""
    source = data.source_options
    if data.mode not in source.modes:
        allowed = " or ".join(f'"{mode}"' for mode in source.modes)
        yield (
            f'data.mode = "{data.mode}" is not possible with data.source = "{data.source}": it '
            f"must be {allowed}"
        )
    yield from source.problems(data, vocab_size)
    if isinstance(data.eos, int) and data.eos >= vocab_size:
        yield f"data.eos = {data.eos} is outside the vocabulary: model.vocab_size = {vocab_size}"
