"""Registry of built-in data sources."""

from mtraining_jax.utils.plugins import Registry

_HERE = "mtraining_jax.data.sources"

SOURCES = Registry(
    "data source",
    base="mtraining_jax.data.source:Source",
    built_in={
        "python_stdlib": f"{_HERE}.text:PythonStdlib",
        "synthetic": f"{_HERE}.synthetic:Synthetic",
        "text": f"{_HERE}.text:TextFiles",
        "jsonl": f"{_HERE}.jsonl:JsonLines",
        "parquet": "mtraining_jax.tools.corpus.arrow:Parquet",
        "hf_disk": "mtraining_jax.tools.corpus.arrow:HuggingFaceOnDisk",
        "mds": "mtraining_jax.tools.corpus.mds:MosaicShards",
        "tokens": f"{_HERE}.tokens:TokenFiles",
        "mixture": f"{_HERE}.mixture:Mixture",
        "given": f"{_HERE}.given:Given",
    },
)
