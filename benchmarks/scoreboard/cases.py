"""What every package computes: lengths, masks, inputs, and exact samples of the results.

`python -m benchmarks.scoreboard.cases JOB` writes those of one length. Needs no JAX.
"""

import argparse
import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np

from benchmarks import workers
from benchmarks.kernels.masks import BLOCK
from benchmarks.peers.problems import (
    INPUTS,
    Problem,
    draw_bits,
    mask_of,
    read_input,
    samples,
    write_inputs,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """Causal attention of one sequence with a mask.

    Attributes:
        mask: "dense"; "documents" of `size` tokens each; a "window" of the last `size` keys; or
            "lists" of `size` blocks of 128 keys, random ones per head and row of 128 queries.
    """

    seq_len: int
    heads: int
    kv_heads: int
    dim: int
    mask: str
    size: int

    @classmethod
    def parse(cls, name: str) -> "Case":
        """Reads a name, also as the type of a command's option."""
        count = r"([1-9]\d*)"
        masks = f"(?:dense|(documents|window|lists){count})"
        found = re.fullmatch(f"{count},{count}/{count},D{count},{masks}", name)
        if (
            not found
            or int(found[1]) % BLOCK
            or int(found[2]) % int(found[3])
            or (
                found[5] == "documents" and (int(found[6]) % BLOCK or int(found[1]) % int(found[6]))
            )
        ):
            raise argparse.ArgumentTypeError(
                f"{name!r} must look like 32768,16/2,D128,dense or end with documents4096, "
                f"window4096 or lists8: tokens (a multiple of {BLOCK}), heads/key-value heads, "
                f"head dim, mask; documents are multiples of {BLOCK} and fill the sequence"
            )
        seq_len, heads, kv_heads, dim = map(int, found.groups()[:4])
        return cls(seq_len, heads, kv_heads, dim, found[5] or "dense", int(found[6] or 0))

    @property
    def name(self) -> str:
        shape = f"{self.seq_len},{self.heads}/{self.kv_heads},D{self.dim}"
        return f"{shape},{self.mask}{self.size or ''}"

    @property
    def problem(self) -> Problem:
        """The dense problem with the same inputs and samples."""
        return Problem(self.seq_len, 1, self.heads, self.kv_heads, self.dim, "dense")

    def bits(self, seed: int) -> np.ndarray | None:
        """Draws the lists, uint32 [1, Hq, NB, ceil(NB/32)]; None for other masks."""
        if self.mask != "lists":
            return None
        return draw_bits(dataclasses.replace(self.problem, listed=self.size), seed)

    def sees(
        self, head: int, queries: np.ndarray, keys: np.ndarray, bits: np.ndarray | None
    ) -> np.ndarray:
        """Which keys each query sees: int [n], int [m] to bool [n, m]."""
        q, k = queries[:, None], keys
        seen = k <= q
        if self.mask == "documents":
            seen &= q // self.size == k // self.size
        elif self.mask == "window":
            seen &= q - k < self.size
        elif bits is not None:
            listed = mask_of(np, bits[0, head].view(np.int32), self.seq_len // BLOCK)
            seen &= listed[q // BLOCK, k // BLOCK]
        return seen


def shapes(seq_len: int) -> list[Case]:
    """The four masks at one length; lists have a sixteenth of the causal pairs."""
    lists = max(seq_len // BLOCK // 32, 1)
    masks = "dense", "documents4096", "window4096", f"lists{lists}"
    return [Case.parse(f"{seq_len},16/2,D128,{mask}") for mask in masks]


CASES = [case for seq_len in (8192, 32768, 131072) for case in shapes(seq_len)]


def folder_of(scratch: Path, case: Case) -> Path:
    """The folder with the inputs and the exact samples of a case."""
    return scratch / case.name.replace("/", "-")


def exact(case: Case, arrays: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Samples of out, dq, dk, dv in fp32: [2, 128, D], where `samples` says."""
    group, scale, bits = case.heads // case.kv_heads, case.dim**-0.5, case.bits(seed)

    def row(head: int, block: int) -> tuple[np.ndarray, ...]:
        """Weights, slopes, queries, output gradient, and the keys that the queries see."""
        queries = np.arange(block * BLOCK, (block + 1) * BLOCK)
        seen = case.sees(head, queries, np.arange(queries[-1] + 1), bits)
        keys = np.flatnonzero(seen.any(0))
        q, dout = (arrays[x][0, queries, head].astype(np.float32) for x in ("q", "dout"))
        k, v = (arrays[x][0, keys, head // group].astype(np.float32) for x in ("k", "v"))
        scores = np.where(seen[:, keys], q @ k.T * scale, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        slopes = dout @ v.T
        slopes -= (weights * slopes).sum(-1, keepdims=True)
        slopes *= weights * scale
        return weights, slopes, q, dout, keys, k, v

    def outputs(place: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
        weights, slopes, *_, k, v = row(*place[1:])
        return weights @ v, slopes @ k

    def added(place: tuple[int, int]) -> np.ndarray:
        """What a row of queries adds to dk and dv of the sampled blocks."""
        weights, slopes, q, dout, keys, _, _ = row(*place)
        found = np.zeros((2, len(blocks), BLOCK, case.dim), np.float32)
        for i, block in enumerate(blocks):
            here = np.flatnonzero(keys // BLOCK == block)
            places = keys[here] % BLOCK
            found[0, i, places] = slopes[:, here].T @ q
            found[1, i, places] = weights[:, here].T @ dout
        return found

    blocks = [block for _, _, block in samples(case.problem, "dk")]
    ((_, kv_head, _), *_) = samples(case.problem, "dk")
    heads = range(kv_head * group, (kv_head + 1) * group)
    later = range(min(blocks), case.seq_len // BLOCK)
    with ThreadPoolExecutor() as pool:
        out, dq = map(np.stack, zip(*pool.map(outputs, samples(case.problem, "out")), strict=True))
        dk, dv = sum(pool.map(added, itertools.product(heads, later)))
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


def write(cases: Sequence[Case], scratch: Path, seed: int) -> None:
    """Writes inputs, the same for all cases of a length, and exact samples of each."""
    first = folder_of(scratch, cases[0])
    write_inputs(cases[0].problem, first, seed)
    arrays = {name: read_input(first, name).view(ml_dtypes.bfloat16) for name in INPUTS}
    for case in cases:
        folder = folder_of(scratch, case)
        folder.mkdir(parents=True, exist_ok=True)
        if case != cases[0]:
            for name in INPUTS:
                (folder / f"{name}.npy").unlink(missing_ok=True)
                (folder / f"{name}.npy").hardlink_to(first / f"{name}.npy")
        np.savez(folder / "exact-True.npz", **exact(case, arrays, seed))


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    write([Case.parse(name) for name in job["cases"]], Path(job["scratch"]), job["seed"])
    workers.my_turn()
