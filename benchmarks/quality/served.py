r"""Loss and speed of answers as the engine serves them, for models trained with several patterns.

    python -m benchmarks.quality.served --model dense=runs/dense/hf sparse=runs/sparse/hf \
        --texts heldout.npy --seq-len 32768 --results served.jsonl --out served.md

The last --answer tokens of each text are a given answer to what comes before. Arms: dense
attention; a sparse prompt with answers that attend densely; a sparse prompt with answers that
select. Differences are paired by text, in nats, with standard errors over texts. Far copies are
tokens that end four tokens which occurred before, more than 256 tokens back. Speed: the
first texts as prompts, --batches of them at a time, --new-tokens greedy tokens each; tokens of all
prompts per second. The same command resumes.
"""

import argparse
import dataclasses
import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from benchmarks.options import at_least, make_parser
from benchmarks.quality.far_copies import far_copies
from benchmarks.report import Page, number, setting, table_head, table_line
from benchmarks.result_file import append_lines, read_lines
from benchmarks.timing import log
from mtraining_jax.tools.evaluate.engine.engine import Engine
from mtraining_jax.tools.evaluate.engine.options import AnswerKind, GenerateOptions
from mtraining_jax.utils.errors import UserError

ARMS = "dense", "dense answers", "sparse"
_BASE = ARMS[1]  # differences are to it
_COLUMNS = (
    "trained", "served", "loss", "difference", "far copies", "tokens/s", "prompt s",
)  # fmt: skip


def engines(folder: str, overrides: dict[str, str]) -> Iterator[tuple[str, Engine]]:
    """The engine of each arm; they share parameters and programs."""
    sparse = Engine.load(folder, attention="sparse", overrides=overrides, answers="sparse")
    network = sparse.loaded.network
    for arm, answers in zip(ARMS, (None, "dense", "sparse"), strict=True):
        if answers is None:
            yield arm, sparse.dense()
            continue
        own = dataclasses.replace(network, answers=cast(AnswerKind, answers))
        yield arm, Engine(dataclasses.replace(sparse.loaded, network=own), like=sparse)


def losses_of(engine: Engine, tokens: np.ndarray, answer: int) -> dict[str, Any]:
    """Loss of the answer, and the sum over its far copies, with their number."""
    found = engine.forced(tokens[:-answer], tokens[-answer:])
    losses, copies = -np.asarray(found.log_probs, np.float64), far_copies(tokens)[-answer:]
    return {
        "loss": float(losses.mean()), "copies": int(copies.sum()),
        "copies_loss": float(losses[copies].sum()), "density": found.density,
    }  # fmt: skip


def speed_of(engine: Engine, prompts: np.ndarray, new: int) -> dict[str, Any]:
    """Seconds of a prompt and tokens per second after all prompts, of the second of two calls."""
    options, ends = GenerateOptions(max_new_tokens=new), [frozenset()] * len(prompts)
    for _ in range(2):
        found = engine.generate_many(list(prompts), options, ends, len(prompts))
    return {
        "prompt_seconds": found[0].prefill_seconds,
        "tokens_per_second": (new - 1) / found[0].decode_seconds,
    }


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows of the table of all models and arms."""
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        texts = {(row["arm"], row["text"]): row for row in own if "loss" in row}
        for arm in ARMS:
            mine = {text: row for (x, text), row in texts.items() if x == arm}
            if not mine:
                continue
            base = {text: row for (x, text), row in texts.items() if x == _BASE and text in mine}
            pairs = [mine[text]["loss"] - row["loss"] for text, row in base.items()]
            error = np.std(pairs, ddof=1) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.nan
            copies = sum(row["copies"] for row in mine.values())
            speeds = {x["prompts"]: x for x in own if x["arm"] == arm and "prompts" in x}
            rates = [f"{speeds[n]['tokens_per_second']:.1f}" for n in sorted(speeds)]
            seconds = speeds[min(speeds)]["prompt_seconds"] if speeds else None
            lines.append([
                model, arm, number(float(np.mean([row["loss"] for row in mine.values()])), 4),
                "" if arm == _BASE or not pairs else f"{np.mean(pairs):+.4f} ± {error:.4f}",
                number(sum(x["copies_loss"] for x in mine.values()) / max(copies, 1), 4),
                ", ".join(rates), number(seconds),
            ])  # fmt: skip
    return [table_line(line) for line in lines]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what the results lack, and prints the table."""
    args = _parse(argv)
    texts = _texts(args)
    numbers = args.numbers or range(len(texts))
    overrides = dict(text.split("=", 1) for text in args.override)
    same = {
        "seq_len": args.seq_len, "answer": args.answer, "overrides": sorted(args.override),
        "texts": hashlib.sha256(texts.tobytes()).hexdigest(), "new_tokens": args.new_tokens,
    }  # fmt: skip
    folders = {name: str(Path(folder).resolve()) for name, folder in args.model}
    rows = [
        row for row in read_lines(args.results)
        if row["settings"] == same and row["folder"] == folders.get(row["model"], row["folder"])
    ]  # fmt: skip
    done = {
        (row["model"], row["arm"], row["text"] if "text" in row else f"{row['prompts']} prompts")
        for row in rows
    }

    def add(row: dict[str, Any]) -> None:
        rows.append(row | {"settings": same, "device": jax.devices()[0].device_kind})
        append_lines(args.results, rows[-1:])
        log(str(row))

    for name, folder in args.model:
        for arm, engine in engines(folder, overrides):
            about = {"model": name, "folder": folders[name], "arm": arm}
            for text in numbers:
                if (name, arm, text) not in done:
                    add(about | {"text": text} | losses_of(engine, texts[text], args.answer))
            for count in args.batches:
                if (name, arm, f"{count} prompts") not in done:
                    prompts = texts[:count, : -args.answer]
                    speed = speed_of(engine, prompts, args.new_tokens)
                    add(about | {"prompts": count} | speed)
    page = Page(args.out)
    how = f"{args.seq_len} tokens, the last {args.answer} are the answer; {len(numbers)} texts"
    page.add("# Answers as served", "", f"{setting()}. {how}.", "")
    page.add(*table_head(_COLUMNS), *table(rows))


def _texts(args: argparse.Namespace) -> np.ndarray:
    """Token ids of all texts, int32 [N, --seq-len]."""
    texts = np.load(args.texts)
    if texts.shape[1] < args.seq_len:
        raise UserError(f"--seq-len={args.seq_len}, but texts have {texts.shape[1]} tokens")
    if (most := max(args.batches, default=0)) > len(texts):
        raise UserError(f"--batches={most}, but there are {len(texts)} texts")
    return texts[:, : args.seq_len].astype(np.int32)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__ or "", "out")
    parser.add_argument("--model", type=_named, nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--texts", type=Path, required=True, help="integers [N, S], .npy")
    parser.add_argument("--seq-len", type=at_least(256), required=True, help="tokens of a text")
    parser.add_argument("--numbers", type=int, nargs="*", help="texts; all by default")
    parser.add_argument("--answer", type=at_least(2), default=512, help="tokens of the answer")
    parser.add_argument("--new-tokens", type=at_least(2), default=128, help="for the speed")
    parser.add_argument(
        "--batches", type=at_least(1), nargs="*", default=[1, 8], help="prompts at a time"
    )
    parser.add_argument("--override", nargs="*", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--results", type=Path, required=True, metavar="FILE", help="JSON lines")
    return parser.parse_args(argv)


def _named(text: str) -> tuple[str, str]:
    name, _, folder = text.partition("=")
    if not folder:
        raise UserError(f"--model={text} must be NAME=FOLDER")
    return name, folder


if __name__ == "__main__":
    main()
