"""Cuts tier C's training text into documents of mixed lengths, to time data-parallel replicas.

    python -m experiments.data c
    python -m experiments.documents

Writes runs/quality/data/documents.npy: uint16 [n], each document with its end token. Boundaries are
random and do not follow the text; the text only makes densities by length realistic.
"""

from pathlib import Path

import numpy as np

from benchmarks.options import make_parser
from experiments.data import FOLDER

# Document lengths in tokens: lognormal, clipped to the bounds.
MEDIAN, SIGMA, BOUNDS = 8000, 1.4, (256, 120_000)
END, OTHER = 0, 1  # SmolLM2's end token, and its replacement within a document
SEED = 0


def documents_of(rows: np.ndarray) -> np.ndarray:
    """Cuts token ids [...] into documents, each with its end token: uint16 [n], no remainder."""
    ids = np.where(rows.reshape(-1) == END, OTHER, rows.reshape(-1))
    rng = np.random.default_rng(SEED)
    # Enough documents even if all have the minimum length.
    drawn = rng.lognormal(np.log(MEDIAN), SIGMA, ids.size // BOUNDS[0] + 1)
    ends = np.cumsum(np.clip(drawn.astype(int), *BOUNDS))
    ends = ends[ends < ids.size]
    ids[ends - 1] = END
    return ids[: ends[-1]].astype(np.uint16)


def main(argv: list[str] | None = None) -> None:
    """Writes the file."""
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, default=FOLDER / "data", help="data of all tiers")
    folder = parser.parse_args(argv).data
    source = folder / "c/train.npy"
    if not source.is_file():
        parser.error(f"{source} is missing; create it with: python -m experiments.data c")
    ids = documents_of(np.load(source))
    np.save(folder / "documents.npy", ids)
    count = np.count_nonzero(ids == END)
    print(f"{folder / 'documents.npy'}: {count} documents, {ids.size} tokens")


if __name__ == "__main__":
    main()
