"""What all kernels compute: shapes, lists of blocks, inputs, and exact samples of the results.

`python -m benchmarks.peers.problems JOB` writes a problem's. Needs neither JAX nor torch.
"""

import argparse
import dataclasses
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks import workers
from benchmarks.kernels.masks import BLOCK, Work, causal_tiles, dense_flops

INPUTS = "q", "k", "v", "dout"
_PIECES = 16  # of an input, drawn at the same time
_WORD = 32


@dataclasses.dataclass(frozen=True)
class Problem:
    """One shape; `listed` blocks in a row of blocks, or None for dense causal attention."""

    seq_len: int
    batch: int
    heads: int
    kv_heads: int
    dim: int
    listed: int | None

    @classmethod
    def parse(cls, name: str) -> "Problem":
        """Reads a name, also as the type of a command's option."""
        found = re.fullmatch(r"(\d+)x(\d+),(\d+)/(\d+),D(\d+),([1-9]\d*|dense)", name)
        if not found or int(found[1]) % BLOCK or int(found[3]) % int(found[4]):
            raise argparse.ArgumentTypeError(
                f"{name!r} must look like 32768x2,16/2,D128,64 or 8192x8,4/2,D64,dense: tokens (a "
                f"multiple of {BLOCK}) x batch, heads/key-value heads, head dim, blocks a row"
            )
        *sizes, listed = found.groups()
        return cls(*map(int, sizes), None if listed == "dense" else int(listed))

    @property
    def name(self) -> str:
        shape = f"{self.seq_len}x{self.batch},{self.heads}/{self.kv_heads},D{self.dim}"
        return f"{shape},{self.listed or 'dense'}"

    @property
    def num_blocks(self) -> int:
        return self.seq_len // BLOCK

    def work(self) -> Work:
        """Computed blocks of all heads; those of the diagonal count in full."""
        rows = np.minimum(np.arange(1, self.num_blocks + 1), self.listed or self.num_blocks)
        return Work(int(rows.sum()) * self.heads * self.batch)

    def density(self) -> float:
        return self.work().tiles / causal_tiles(self.heads * self.batch, self.seq_len)

    def flops(self) -> float:
        """Forward pass: 4 D per computed pair; half of S x S pairs if dense."""
        if self.listed is None:
            return dense_flops(self.heads * self.batch, self.seq_len, self.dim)
        return self.work().flops(self.dim)

    def shape(self, name: str) -> tuple[int, int, int, int]:
        """[B, S, H, D] of an input."""
        heads = self.kv_heads if name in ("k", "v") else self.heads
        return self.batch, self.seq_len, heads, self.dim


PROBLEMS = [
    Problem.parse(name)
    for name in """
    131072x1,16/16,D128,64 32768x1,16/16,D128,32 131072x1,16/2,D128,dense 131072x1,16/2,D128,64
    32768x2,16/2,D64,32 32768x2,16/2,D128,8 131072x1,16/2,D128,16 131072x1,16/2,D128,256
    131072x1,16/2,D64,64 32768x2,16/2,D128,dense 131072x1,16/2,D64,dense 8192x8,16/16,D128,8
    8192x8,16/16,D64,16 65536x1,16/16,D128,128 131072x1,16/2,D128,1024 524288x1,16/2,D128,64
    8192x8,16/2,D128,dense 16384x4,16/2,D64,16""".split()
]


def draw_lists(problem: Problem, seed: int) -> np.ndarray:
    """Draws `BlockMaskIndex.bits`, uint32 [B, Hq, NB, ceil(NB/32)]: own and earlier blocks."""
    rng, size = np.random.default_rng(seed), problem.num_blocks
    shape = problem.batch, problem.heads, size, -(-size // _WORD)
    words = np.zeros(shape, np.uint32)
    for where in np.ndindex(shape[:3]):
        marked, row = np.zeros(shape[3] * _WORD, bool), where[2]
        earlier = min(problem.listed or size, row + 1) - 1
        marked[rng.choice(max(row, 1), earlier, replace=False, shuffle=False)] = True
        marked[row] = True
        words[where] = np.packbits(marked, bitorder="little").view(np.uint32)
    return words


def mask_of(xp: Any, bits: Any, size: int) -> Any:
    """Unpacks int32 [..., ceil(NB/32)] to bool [..., NB]; `xp` is numpy or torch."""
    marked = (bits[..., None] >> xp.arange(_WORD, dtype=xp.int32)) & 1
    return marked.reshape(*bits.shape[:-1], -1)[..., :size] == 1


def lists(xp: Any, mask: Any, width: int | None = None) -> tuple[Any, Any]:
    """Counts, int32 [...], and numbers, int32 [..., width], of listed blocks, which come first."""
    order = xp.argsort(xp.asarray(~mask, dtype=xp.uint8), stable=True)[..., :width]
    return xp.asarray(mask.sum(-1), dtype=xp.int32), xp.asarray(order, dtype=xp.int32)


def split_lists(xp: Any, mask: Any, width: int | None = None) -> tuple[Any, Any, Any, Any]:
    """Lists of blocks on the diagonal and of others, of each query block (or key block)."""
    rows = xp.arange(mask.shape[-1])
    own = xp.asarray(mask[..., rows, rows], dtype=xp.int32)
    numbers = xp.asarray(xp.zeros_like(own) + rows, dtype=xp.int32)[..., None]
    return own, numbers, *lists(xp, mask & (rows[:, None] != rows), width)


def write_inputs(problem: Problem, folder: Path, seed: int) -> None:
    """Writes normal inputs, as the bits of bf16, and the lists."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "bits.npy", draw_lists(problem, seed))
    seeds = np.random.SeedSequence(seed).spawn(len(INPUTS))
    for name, key in zip(INPUTS, seeds, strict=True):
        shape = problem.shape(name)

        def draw(piece: np.random.SeedSequence, count: int = int(np.prod(shape))) -> np.ndarray:
            rng = np.random.Generator(np.random.SFC64(piece))
            return rng.standard_normal(count // _PIECES, np.float32).astype(ml_dtypes.bfloat16)

        with ThreadPoolExecutor() as pool:
            drawn = np.concatenate(list(pool.map(draw, key.spawn(_PIECES))))
        np.save(folder / f"{name}.npy", drawn.view(np.int16).reshape(shape))


def read_input(folder: Path, name: str) -> np.ndarray:
    """Bits of bf16, mapped into memory: int16 [B, S, H, D]."""
    return np.load(folder / f"{name}.npy", mmap_mode="r")


def samples(problem: Problem, name: str) -> list[tuple[int, int, int]]:
    """Sequence, head and block of what is compared of out, dq, dk or dv."""
    size, batch = problem.num_blocks, problem.batch - 1
    if name in ("out", "dq"):
        return [(0, 0, size // 2), (batch, problem.heads - 1, size - 1)]
    # Each row that lists the keys is computed; where rows are long, only a few.
    early = size // 2 if problem.work().tiles * 4 < causal_tiles(1, problem.seq_len) else size - 8
    return [(batch, problem.kv_heads - 1, block) for block in (max(early, 0), size - 1)]


def exact(problem: Problem, folder: Path, masked: bool) -> dict[str, np.ndarray]:
    """Samples of out, dq, dk, dv in fp32: [2, 128, D]. Unmasked: the diagonal's blocks in full."""
    arrays = {name: read_input(folder, name).view(ml_dtypes.bfloat16) for name in INPUTS}
    mask = mask_of(np, np.load(folder / "bits.npy").view(np.int32), problem.num_blocks)
    group = problem.heads // problem.kv_heads

    def part(name: str, batch: int, head: int, blocks: Any) -> np.ndarray:
        split = arrays[name][batch].reshape(problem.num_blocks, BLOCK, -1, problem.dim)
        return split[blocks, :, head].astype(np.float32).reshape(-1, problem.dim)

    def row(batch: int, head: int, block: int) -> tuple[np.ndarray, ...]:
        listed = np.flatnonzero(mask[batch, head, block])
        q, dout = (part(name, batch, head, [block]) for name in ("q", "dout"))
        k, v = (part(name, batch, head // group, listed) for name in ("k", "v"))
        scale = problem.dim**-0.5
        scores = (q @ k.T * scale).reshape(BLOCK, -1, BLOCK)
        if masked:
            scores[:, listed == block] -= np.triu(np.full((BLOCK, BLOCK), np.inf), 1)[:, None]
        weights = np.exp(scores - scores.max((1, 2), keepdims=True)).reshape(BLOCK, -1)
        weights /= weights.sum(-1, keepdims=True)
        slopes = dout @ v.T
        slopes = weights * (slopes - (weights * slopes).sum(-1, keepdims=True)) * scale
        return weights @ v, slopes @ k, weights, slopes, q, dout, listed

    def column(batch: int, kv_head: int, block: int) -> np.ndarray:
        def added(where: np.ndarray) -> np.ndarray:
            *_, weights, slopes, q, dout, listed = row(batch, kv_head * group + where[0], where[1])
            keys = np.arange(BLOCK) + BLOCK * int(np.searchsorted(listed, block))
            return np.stack([slopes[:, keys].T @ q, weights[:, keys].T @ dout])

        heads = slice(kv_head * group, (kv_head + 1) * group)
        return sum(pool.map(added, np.argwhere(mask[batch, heads, :, block])))

    with ThreadPoolExecutor() as pool:
        rows = [row(*where)[:2] for where in samples(problem, "out")]
        columns = [column(*where) for where in samples(problem, "dk")]
    found = map(np.stack, (*zip(*rows, strict=True), *zip(*columns, strict=True)))
    return dict(zip(("out", "dq", "dk", "dv"), found, strict=True))


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    problem, folder = Problem.parse(job["problem"]), Path(job["folder"])
    write_inputs(problem, folder, job["seed"])
    for masked in (True, False)[: 1 if problem.listed is None else 2]:
        np.savez(folder / f"exact-{masked}.npz", **exact(problem, folder, masked))
    workers.my_turn()
