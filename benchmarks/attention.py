"""Times attention, ours beside cuDNN and FlexAttention, and prints one markdown table.

    python benchmarks/attention.py [--seq-len ...] [--masks ...] [--head-dim ...] [--out FILE.md]

FlexAttention needs torch, cuDNN needs a GPU; a peer that cannot run here is left out, and the
output says why.
"""

import argparse
import os
import secrets
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch's share is taken beside
if __name__ == "__main__":  # from a checkout: the script's folder is importable, its parent not
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from benchmarks import report
from benchmarks.cases import Case, Row, Shape
from benchmarks.errors import relative_errors
from benchmarks.flex_peer import FlexPeer
from benchmarks.masks import BLOCK, block_mask
from benchmarks.programs import Ours, random_inputs

HEADS = {128: (16, 2), 64: (14, 2)}  # query and key/value heads by head dim
LONGEST_DENSE = 131072
_START = time.perf_counter()


def main(argv: list[str] | None = None) -> str:
    """Runs the benchmark and returns its markdown."""
    args = _parse(argv)
    ours = Ours(args.backend)
    on_gpu = jax.default_backend() == "gpu"
    flex_shape = Shape(args.flex_seq_len, *HEADS[128], 128)
    flex = None
    wanted = "F" in args.masks and flex_shape.seq_len in args.seq_len and 128 in args.head_dim
    if wanted and on_gpu:
        mask = block_mask(_rng(args.seed, "F", flex_shape), flex_shape.heads, flex_shape.seq_len)
        flex = FlexPeer(flex_shape, mask, args.seed, args.repeats)
    try:
        return _run(args, ours, on_gpu, flex_shape, flex)
    finally:
        if flex is not None:
            flex.close()


def _run(args, ours: Ours, on_gpu: bool, flex_shape: Shape, flex: FlexPeer | None) -> str:
    shapes = [
        Shape(seq_len, *HEADS[dim], dim)
        for seq_len in sorted(args.seq_len, reverse=True) for dim in args.head_dim
    ]
    # The longest sparse problem comes first, so that its peak of memory shows.
    plan: list[tuple[Shape, str, list[str]]] = []
    for shape in shapes:
        sparse = [m for m in ("B", "A") if m in args.masks]
        if sparse:
            plan.append((shape, "slash", sparse))
        if "D" in args.masks and shape.seq_len <= args.longest_dense:
            plan += [(shape, "dense", ["D"])] + ([(shape, "cudnn", ["D"])] if on_gpu else [])
        if "F" in args.masks and shape == flex_shape:
            plan.append((shape, "blocks", ["F"]))
    with ThreadPoolExecutor(8) as pool:
        cases = []
        for shape, kind, masks in plan:
            cases.append((Case(pool, shape, kind, ours), masks))
            _say(f"lowered {kind} S={shape.seq_len} D={shape.dim}")
        for case, _ in cases:
            case.wait()
            _say(f"compiled {case.kind} S={case.shape.seq_len} D={case.shape.dim}")
    torch = None
    if flex is not None:
        running, torch = flex.ready()
        _say(f"FlexAttention: {torch}")
        flex, torch = (flex, torch) if running else (None, f"no FlexAttention ({torch})")

    rows, inputs, of = [], None, None
    for case, masks in cases:
        if of != case.shape:
            inputs, of = None, case.shape
            key = jax.random.fold_in(jax.random.key(args.seed), of.seq_len + of.dim)
            inputs = random_inputs(key, of.seq_len, of.heads, of.kv_heads, of.dim)
            jax.block_until_ready(inputs)
        for mask in masks:
            found = case.measure(inputs, mask, _rng(args.seed, mask, of), args.repeats)
            rows.append(found)
            _say(report.line(found))
            _save(args, rows, {}, torch)
    if flex is not None:
        rows.append(flex.measure())
        _say(report.line(rows[-1]))
    inputs = None
    errors = {}
    for dim in args.head_dim if args.error_seq_len else ():
        masks = tuple(m for m in ("D", "A", "B") if m in args.masks)
        errors[dim] = relative_errors(
            ours, args.seed + dim, args.error_seq_len, *HEADS[dim], dim, masks=masks, cudnn=on_gpu
        )
        _say(f"errors D={dim}: {errors[dim]}")
        _save(args, rows, errors, torch)
    return _save(args, rows, errors, torch)


def _save(args, rows: list[Row], errors: dict, torch: str | None) -> str:
    """Writes what there is so far: a run that is cut short has its first rows."""
    text = report.header(args.seed, args.repeats, torch) + report.table(rows)
    if errors:
        text += "\n" + report.error_table(errors, args.error_seq_len)
    if args.out is not None:
        args.out.write_text(text)
    return text


def _rng(seed: int, mask: str, shape: Shape) -> np.random.Generator:
    return np.random.default_rng([seed, ord(mask), shape.seq_len, shape.dim])


def _say(text: str) -> None:
    print(f"[{time.perf_counter() - _START:6.1f} s] {text}", file=sys.stderr, flush=True)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seq-len", type=int, nargs="+", default=[32768, 65536, 131072, 524288], metavar="S"
    )
    parser.add_argument("--masks", nargs="+", choices="ABDF", default=list("ABDF"))
    parser.add_argument("--head-dim", type=int, nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--longest-dense", type=int, default=LONGEST_DENSE, metavar="S")
    parser.add_argument("--flex-seq-len", type=int, default=131072, metavar="S", help="of mask F")
    parser.add_argument(
        "--error-seq-len", type=int, default=8192, metavar="S", help="0 leaves errors out"
    )
    parser.add_argument("--repeats", type=int, default=10, help="a time is the median of so many")
    parser.add_argument("--seed", type=int, help="of masks and inputs; default: a fresh one")
    parser.add_argument("--backend", choices=["xla", "mosaic_gpu"], help="default: the best here")
    parser.add_argument("--quick", action="store_true", help="one short problem of each kind")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="where the table goes as well")
    args = parser.parse_args(argv)
    if args.quick:
        args.seq_len, args.flex_seq_len = [min(args.seq_len)], min(args.seq_len)
        args.head_dim, args.repeats = args.head_dim[:1], min(args.repeats, 3)
    args.seed = secrets.randbits(31) if args.seed is None else args.seed
    for name in ("seq_len", "flex_seq_len", "error_seq_len"):
        value = getattr(args, name)
        for length in value if isinstance(value, list) else [value]:
            if length % (16 * BLOCK):
                option = name.replace("_", "-")
                parser.error(f"--{option}: {length} is not a multiple of {16 * BLOCK}")
    lengths = args.seq_len + ([args.error_seq_len] if args.error_seq_len else [])
    if "B" in args.masks and min(lengths) < 4096:
        parser.error("--masks: B needs at least 4096 tokens, for its 3000 columns")
    if args.repeats < 1:
        parser.error(f"--repeats: {args.repeats} is not positive")
    return args


if __name__ == "__main__":
    print(main())
