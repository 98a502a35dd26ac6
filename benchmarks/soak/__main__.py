"""Checks that a run that is stopped again and again repeats an uninterrupted one bit by bit.

    python -m benchmarks.soak --out /tmp/soak --report soak.md  # one GPU, 5 to 6 minutes
    python -m benchmarks.soak --out /tmp/soak --devices 2       # sequences sharded over two GPUs
    python -m benchmarks.soak --out /tmp/soak --cpu             # a small trial

Trains a small model with a selected index and audits twice at the same time. The second run is
ended at random moments by SIGKILL, SIGTERM and SIGINT: in audits, while it saves or compiles, and
in other steps. Once its disk is full (its files may not grow), and once its data is replaced. As
often as it audits, a run repeats a step and compares bits. The report compares losses, files and
memory; the exit status is 1 if something is wrong.

The uninterrupted run compiles first, and the other one reads its compiled programs: on a GPU only
the same programs give the same bits. Both share the device, so their times mean nothing.
"""

import sys
from pathlib import Path

import numpy as np

from benchmarks.options import make_parser
from benchmarks.soak.events import Rhythm, draw_events
from benchmarks.soak.pair import SoakedPair
from benchmarks.soak.process import NAMES, make_data
from mtraining_jax.utils.errors import UserError

CONFIG = """\
[run]
steps = {steps}
output_dir = "{out}/runs"
compile_cache_dir = "{out}/compiled"
log_interval = 1
[model]
vocab_size = 512
hidden_size = {hidden}
num_layers = 2
num_heads = 4
num_kv_heads = 2
head_dim = 64
intermediate_size = {inner}
max_position_embeddings = {seq_len}
tie_word_embeddings = true
dtype = "{dtype}"
[sparsity]
kind = "{kind}"
block_size = {block}
[parallel]
devices_per_node = {devices}
{on_cpu}
[data]
source = "tokens"
paths = ["{data}"]
seq_len = {seq_len}
[optimizer]
lr = 1e-3
[audit]
interval = {audit}
num_queries = {rows}
[checkpoint]
interval = {save}
[guard]
interval = {audit}
[metrics]
tensorboard = false
"""
_GPU = dict(hidden=256, inner=512, seq_len=32768, dtype="bfloat16", block=128, rows=256)
CPU = dict(hidden=64, inner=64, seq_len=256, dtype="float32", block=32, rows=32)
_LENGTHS = {
    "gpu": dict(steps=2000, stops=10, every=100, audit_every=20),
    "cpu": dict(steps=60, stops=4, every=10, audit_every=4),
}


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder to create")
    parser.add_argument("--report", type=Path, help="Markdown file; default REPORT.md in --out")
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the CPU, few steps")
    parser.add_argument("--devices", type=int, default=1, help="devices per sequence")
    parser.add_argument("--steps", type=int, help="default 2000; with --cpu 60")
    parser.add_argument("--stops", type=int, help="random ends of the run; default 10 or 4")
    parser.add_argument("--every", type=int, help="steps between checkpoints; default 100 or 10")
    parser.add_argument("--audit-every", type=int, help="steps between audits; default 20 or 4")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--kind", default="sampled_rows", help="pattern that selects the index")
    parser.add_argument("--minutes", type=float, default=9, help="time limit")
    parser.set_defaults(**_LENGTHS["cpu" if parser.parse_args(argv).cpu else "gpu"])
    args = parser.parse_args(argv)
    out = args.out.absolute()
    if out.exists():
        print(f"error: --out={out} exists; name a new folder", file=sys.stderr)
        return 2
    for name in NAMES:
        data = out / "data" / f"{name}.npy"
        make_data(data, 500_000, seed=0)
        text = CONFIG.format(
            steps=args.steps, save=args.every, audit=args.audit_every, kind=args.kind, out=out,
            data=data, devices=args.devices, on_cpu=f"cpu_devices = {args.devices}" * args.cpu,
            **(CPU if args.cpu else _GPU),
        )  # fmt: skip
        (out / f"{name}.toml").write_text(text)
    pair = SoakedPair(out, args.steps, Rhythm(args.audit_every, args.every), args.minutes)
    try:
        pair.run(draw_events(args.steps, args.stops, np.random.default_rng(args.seed)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report = args.report or out / "REPORT.md"
    lines = pair.report()
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("", *lines, sep="\n")
    return 1 if pair.failures else 0


if __name__ == "__main__":
    sys.exit(main())
