"""The goals of the Hopper kernels on one H200, and how a run compares with them."""

from collections.abc import Iterable

from benchmarks.kernels.cases import Row

SEQ_LEN = 131072  # of every goal except the one for memory
MEMORY_SEQ_LEN, MEMORY_BYTES = 524288, 0.3e9
ERROR_RATIO = 1.1  # of ours to cuDNN's own


def progress(row: Row, rows: Iterable[Row]) -> list[str]:
    """How a row compares with its goals; a ratio of 1 or more meets one.

    Args:
        row: of ours.
        rows: of the same run, which a goal may refer to.
    """
    if row.who != "ours":
        return []
    of = {(r.shape.seq_len, r.shape.dim, r.mask, r.who): r for r in rows}
    length, dim, mask = row.shape.seq_len, row.shape.dim, row.mask
    dense = of.get((length, dim, "D", "ours"))
    wide = of.get((length, 128, "B", "ours"))
    found = []

    def reaches(what: str, ratio: float) -> None:
        found.append(f"{what} {ratio:.2f}")

    def below(what: str, ms: float | None, goal: float) -> None:
        if ms is not None:
            reaches(f"{what} <= {goal:g} ms:", goal / ms)

    if (length, mask, dim) == (MEMORY_SEQ_LEN, "B", 128) and row.temp is not None:
        reaches("memory <= 0.3 GB:", MEMORY_BYTES / max(row.temp, 1))
    if length != SEQ_LEN:
        return found
    if mask == "D" and (peer := of.get((length, dim, "D", "cuDNN"))):
        reaches("fwd >= 1.05 cuDNN:", peer.forward / row.forward / 1.05)
        reaches("bwd >= 1.0 cuDNN:", peer.backward / row.backward)
    if dim == 128 and mask in _TIMES:
        forward, backward = _TIMES[mask]
        below("fwd", row.forward, forward)
        below("bwd", row.backward, backward)
    if dim == 128 and mask == "B":
        below("choose + build", row.choose + row.build, 1.5)
        if dense:
            reaches("fwd >= 0.95 dense rate:", _rate(row, dense, "forward") / 0.95)
            reaches("bwd >= 0.90 dense rate:", _rate(row, dense, "backward") / 0.90)
    if dim == 64 and mask == "B" and wide:
        reaches("fwd >= 0.80 rate of D = 128:", _rate(row, wide, "forward") / 0.80)
        reaches("bwd >= 0.75 rate of D = 128:", _rate(row, wide, "backward") / 0.75)
    return found


_TIMES = {"A": (4.3, 12.5), "B": (11.2, 34.0), "F": (8.3, 25.0)}  # forward, backward, ms


def _rate(row: Row, other: Row, which: str) -> float:
    """Executed FLOP/s of a row over those of another."""
    return row.rates(which)[0] / other.rates(which)[0]
