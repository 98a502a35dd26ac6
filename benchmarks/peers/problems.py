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
from benchmarks.kernels.masks import BLOCK, SlashMask, Work, causal_tiles, dense_flops, slash_mask

INPUTS = "q", "k", "v", "dout"
_PIECES = 16  # of an input, drawn at the same time
_WORD = 32


@dataclasses.dataclass(frozen=True)
class Problem:
    """One shape with `listed` blocks in a row of blocks, or "dense" (causal), or "A" or "B".

    The latter are block diagonals and columns of `benchmarks.kernels.masks`, in a batch of 1. "~64"
    lists 64 blocks on average, in uneven rows (`widths`).
    """

    seq_len: int
    batch: int
    heads: int
    kv_heads: int
    dim: int
    listed: int | str

    @classmethod
    def parse(cls, name: str) -> "Problem":
        """Reads a name, also as the type of a command's option."""
        pattern = r"(\d+)x(\d+),(\d+)/(\d+),D(\d+),(~?[1-9]\d*|dense|A|B)"
        found = re.fullmatch(pattern, name)
        if not found or int(found[1]) % BLOCK or int(found[3]) % int(found[4]):
            raise argparse.ArgumentTypeError(
                f"{name!r} must look like 32768x2,16/2,D128,64 or 8192x8,4/2,D64,dense: tokens (a "
                f"multiple of {BLOCK}) x batch, heads/key-value heads, head dim, blocks in a row"
            )
        *sizes, listed = found.groups()
        return cls(*map(int, sizes), int(listed) if listed.isdigit() else listed)

    @property
    def name(self) -> str:
        heads = f"{self.heads}/{self.kv_heads}"
        return f"{self.seq_len}x{self.batch},{heads},D{self.dim},{self.listed}"

    @property
    def kind(self) -> str:
        """What it has: "lists", "dense" (nothing) or "columns"."""
        if self.listed == "dense":
            return "dense"
        return "columns" if self.listed in ("A", "B") else "lists"

    @property
    def num_blocks(self) -> int:
        return self.seq_len // BLOCK

    def slashes(self, seed: int) -> SlashMask:
        """Draws the diagonals and columns of "A" or "B"."""
        return slash_mask(str(self.listed), np.random.default_rng(seed), self.heads, self.seq_len)

    def work(self, seed: int) -> Work:
        """Computed blocks and columns of all heads; blocks of the diagonal count in full."""
        if self.kind == "columns":
            return self.slashes(seed).work()
        return Work(int(self.widths(seed).sum()))

    def widths(self, seed: int) -> np.ndarray:
        """Numbers of listed blocks, int [B, Hq, NB].

        Uneven ones grow with the row, by 0.5 to 1.5 of the mean in the heads, times a log-normal
        factor (sigma 0.5) in each row; the last row, a dense suffix, lists all blocks.
        """
        rows = np.arange(1, self.num_blocks + 1)
        shape = self.batch, self.heads, self.num_blocks
        if not isinstance(self.listed, str) or not self.listed.startswith("~"):
            width = self.listed if isinstance(self.listed, int) else self.num_blocks
            return np.broadcast_to(np.minimum(rows, width), shape)
        rng = np.random.default_rng(seed)
        heads = rng.permutation(np.linspace(0.5, 1.5, self.heads))[:, None]
        factors = rng.lognormal(-0.125, 0.5, shape)
        uneven = 2 * int(self.listed[1:]) * rows / self.num_blocks * heads * factors
        uneven[..., -1] = self.num_blocks
        return np.clip(uneven.round().astype(int), np.minimum(rows, 2), rows)

    def figures(self, seed: int) -> dict[str, float]:
        """Density, and FLOP of the forward pass: 4 D per computed pair, half of S x S if dense."""
        work, heads = self.work(seed), self.heads * self.batch
        density = (work.tiles + work.bars / BLOCK) / causal_tiles(heads, self.seq_len)
        flops = work.flops(self.dim)
        if self.kind == "dense":
            flops = dense_flops(heads, self.seq_len, self.dim)
        return {"density": density, "flops": flops}

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
    131072x1,16/2,D128,B 8192x8,16/2,D128,dense 16384x4,16/2,D64,16""".split()
]


def draw_bits(problem: Problem, seed: int) -> np.ndarray:
    """Draws `BlockMaskIndex.bits`, uint32 [B, Hq, NB, ceil(NB/32)]: own and earlier blocks."""
    rng, size = np.random.default_rng(seed), problem.num_blocks
    words = np.zeros((problem.batch, problem.heads, size, -(-size // _WORD)), np.uint32)
    diagonals = problem.slashes(seed).diagonals if problem.kind == "columns" else ()
    widths = problem.widths(seed)
    for where in np.ndindex(words.shape[:3]):
        _, head, row = where
        earlier = rng.choice(max(row, 1), widths[where] - 1, replace=False, shuffle=False)
        if diagonals:
            earlier = row - diagonals[head][diagonals[head] <= row]
        marked = np.zeros(words.shape[3] * _WORD, bool)
        marked[earlier] = marked[row] = True
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
    """Writes normal inputs, as the bits of bf16."""
    folder.mkdir(parents=True, exist_ok=True)
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
    # Each row that sees the keys is computed; where these are many and long, only a few.
    few = problem.kind == "lists" and problem.widths(0).mean() * 8 <= size
    early = size // 2 if few else size - 4
    return [(batch, problem.kv_heads - 1, block) for block in (max(early, 0), size - 1)]


def exact(problem: Problem, folder: Path, seed: int, masked: bool) -> dict[str, np.ndarray]:
    """Samples of out, dq, dk, dv in fp32: [2, 128, D]. Unmasked: the diagonal's blocks in full."""
    arrays = {name: read_input(folder, name).view(ml_dtypes.bfloat16) for name in INPUTS}
    size, group = problem.num_blocks, problem.heads // problem.kv_heads
    blocks = mask_of(np, draw_bits(problem, seed).view(np.int32), size)
    columns = np.zeros((problem.heads, problem.seq_len), bool)
    for head, tokens in enumerate(
        problem.slashes(seed).verticals if problem.kind == "columns" else ()
    ):
        columns[head, tokens] = True

    def row(batch: int, head: int, block: int) -> tuple[np.ndarray, ...]:
        positions = np.arange(block * BLOCK, (block + 1) * BLOCK)
        seen = blocks[batch, head, block].repeat(BLOCK) | columns[head]
        keys = np.flatnonzero(seen[: positions[-1] + 1])
        q, dout = (arrays[x][batch, positions, head].astype(np.float32) for x in ("q", "dout"))
        k, v = (arrays[x][batch, keys, head // group].astype(np.float32) for x in ("k", "v"))
        scale = problem.dim**-0.5
        later = masked & (keys > positions[:, None])
        scores = np.where(later, -np.inf, q @ k.T * scale)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        slopes = dout @ v.T
        slopes = weights * (slopes - (weights * slopes).sum(-1, keepdims=True)) * scale
        return weights @ v, slopes @ k, weights, slopes, q, dout, keys

    def column(batch: int, kv_head: int, block: int) -> np.ndarray:
        def added(where: np.ndarray) -> np.ndarray:
            *_, weights, slopes, q, dout, keys = row(batch, kv_head * group + where[0], where[1])
            here = np.flatnonzero(keys // BLOCK == block)
            found = np.zeros((2, BLOCK, problem.dim), np.float32)
            found[:, keys[here] % BLOCK] = slopes[:, here].T @ q, weights[:, here].T @ dout
            return found

        heads = slice(kv_head * group, (kv_head + 1) * group)
        tokens = slice(block * BLOCK, (block + 1) * BLOCK)
        seen = columns[heads, tokens].any(-1)[:, None] & (np.arange(size) >= block)
        return sum(pool.map(added, np.argwhere(seen | blocks[batch, heads, :, block])))

    with ThreadPoolExecutor() as pool:
        queries = [row(*where)[:2] for where in samples(problem, "out")]
        keys = [column(*where) for where in samples(problem, "dk")]
    found = map(np.stack, (*zip(*queries, strict=True), *zip(*keys, strict=True)))
    return dict(zip(("out", "dq", "dk", "dv"), found, strict=True))


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    problem, folder, seed = Problem.parse(job["problem"]), Path(job["folder"]), job["seed"]
    write_inputs(problem, folder, seed)
    for masked in (True, False)[: 2 if problem.kind == "lists" else 1]:
        np.savez(folder / f"exact-{masked}.npz", **exact(problem, folder, seed, masked))
    workers.my_turn()
