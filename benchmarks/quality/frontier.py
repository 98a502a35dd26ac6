r"""Measures the loss that sparse patterns cost a pretrained model, and the time that they save.

    python -m examples.smollm2 MODEL
    python -m benchmarks.quality.texts --tokenizer MODEL/tokenizer.json --out TEXTS
    python -m benchmarks.quality.frontier --model MODEL --texts TEXTS --out RESULT
    python -m benchmarks.quality.frontier --model MODEL --texts TEXTS --out RESULT \
        --patterns xattention,stride=8,tau=0.9 my.module:Mine,option=3

Runs the model on long texts with sparse attention in every layer, once per setting of a pattern,
and compares the losses with those of dense attention, on all tokens and on far copies
(`far_copies.py`). Then times selection, forward and backward on the queries, keys and
values of real layers, against dense attention in the same run. YaRN stretches the context of the
model if needed.

Writes RESULT.jsonl, with a line per setting as soon as it is measured, RESULT.md and, with
matplotlib (the extra "plot"), RESULT.png.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks import report
from benchmarks.options import make_parser
from benchmarks.quality import frontier_report
from benchmarks.quality.measure import (
    Programs,
    Selector,
    baseline,
    measure_losses,
    measure_times,
    summary,
)
from benchmarks.quality.patterns import BASELINES, FIELD, ROWS, parse
from benchmarks.quality.stepped_model import SteppedModel, read_model
from benchmarks.timing import log
from mtraining_jax.patterns.base import ModelSizes
from mtraining_jax.patterns.dense import Dense
from mtraining_jax.utils.errors import UserError
from pallas_kernels import DenseIndex

_TIMED = 4  # layers, spread over the model


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        _run(args)
    except UserError as error:
        parser.error(str(error))


def _run(args: argparse.Namespace) -> None:
    dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    texts, kinds = _read_texts(args)
    model = SteppedModel(read_model(args.model, args.seq_len, dtype), args.seq_len)
    spec, rng = model.spec, np.random.default_rng(args.seed)
    sizes = ModelSizes(spec.num_layers, spec.num_heads, args.seq_len)
    patterns = {text: parse(text, sizes) for text in args.patterns or (*BASELINES, *ROWS, *FIELD)}
    every = {"dense": Dense()} | patterns
    for text, pattern in every.items():
        if args.seq_len % pattern.block_size:
            raise UserError(
                f"--seq-len {args.seq_len} is not a multiple of {pattern.block_size}, the "
                f"block_size of {text}"
            )
    q, k = (
        jax.ShapeDtypeStruct((1, args.seq_len, heads, spec.head_dim), jnp.dtype(dtype))
        for heads in (spec.num_heads, spec.num_kv_heads)
    )
    rows = np.sort(rng.choice(args.seq_len, args.recall_rows, replace=False)).astype(np.int32)
    programs = Programs(args.backend, args.seq_len, rows)
    dense_index = DenseIndex(every["dense"].block_size)

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        return programs.attention(q, k, v, dense_index)

    with ThreadPoolExecutor(args.compilers) as pool:
        compiling = {
            text: pool.submit(Selector, pattern, q, k, args.backend)
            for text, pattern in every.items()
        }
        losses = np.stack([jax.device_get(model.losses(tokens, attend)) for tokens in texts])
        # Wait for all: compiling tries kernels on the device, which would disturb the times.
        wait(compiling.values())
    numbers = sorted({int((i + 0.5) * spec.num_layers / _TIMED) for i in range(_TIMED)})
    # Each from another text, so that all kinds of text are timed.
    layers = [
        model.heads(texts[i * len(texts) // len(numbers)], attend, number)
        for i, number in enumerate(numbers)
    ]
    dout = jnp.asarray(rng.standard_normal(q.shape), q.dtype)
    timed = (layers, dout, args.repeats, numbers)
    dense = compiling["dense"].result()
    start = {
        "setting": report.setting(), "device": jax.devices()[0].device_kind,
        "seq_len": args.seq_len, "sequences": len(texts), "dtype": dtype, "seed": args.seed,
        "recall_rows": args.recall_rows, "repeats": args.repeats, "timed_layers": numbers,
        "model": args.model.name, **baseline(losses, texts),
        "times": measure_times(programs, dense, *timed),
    }  # fmt: skip
    record = frontier_report.Record(args.out, start)
    log(f"dense: {frontier_report.dense_line(start)}")
    failed = []
    for text, pattern in patterns.items():
        try:
            selector = compiling[text].result()
            found = summary(measure_losses(model, programs, selector, texts), losses, texts, kinds)
            times = measure_times(programs, selector, *timed)
        except Exception as error:  # a failing pattern must not stop the others
            failed.append(text)
            record.fail(text, error)
            log(f"{text}: FAILED: {type(error).__name__}: {error}")
            continue
        row = {"pattern": text, "what": pattern.describe(), **found, "times": times}
        record.add(row)
        log(frontier_report.line(row, start))
    record.draw()
    if failed:
        sys.exit(f"error: {len(failed)} of {len(patterns)} settings failed: {'; '.join(failed)}")


def _read_texts(args: argparse.Namespace) -> tuple[np.ndarray, list[str]]:
    """Tokens, integers [N, S], and the kind of each text; evenly spaced to cover all kinds."""
    try:
        tokens = np.load(args.texts / "tokens.npy")
        sources = json.loads((args.texts / "sources.json").read_text())
    except (OSError, ValueError) as error:
        reason = f"is not a folder of benchmarks.quality.texts: {error}"
        raise UserError(f"{args.texts} {reason}") from None
    if not 1 <= args.sequences <= len(tokens):
        raise UserError(f"--sequences {args.sequences} must be from 1 to {len(tokens)}")
    if args.seq_len > tokens.shape[1]:
        raise UserError(f"--seq-len {args.seq_len} is more than the {tokens.shape[1]} of the texts")
    selected = np.linspace(0, len(tokens), args.sequences, endpoint=False).astype(int)
    return tokens[selected, : args.seq_len], [sources[i]["kind"] for i in selected]


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__, "backend", "repeats", "seed")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--texts", type=Path, required=True, help="of benchmarks.quality.texts")
    parser.add_argument("--out", type=Path, required=True, help="path without a suffix")
    parser.add_argument("--seq-len", type=int, default=32768, metavar="S")
    parser.add_argument("--sequences", type=int, default=16, help="number of texts")
    parser.add_argument(
        "--patterns", nargs="+", metavar="NAME,OPTION=VALUE", help="default: a list of all kinds"
    )
    parser.add_argument("--recall-rows", type=int, default=128, help="queries for recall")
    parser.add_argument("--compilers", type=int, default=4, help="programs compiled at a time")
    return parser


if __name__ == "__main__":
    main()
