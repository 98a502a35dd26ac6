"""A run that is stopped again and again gives the losses of one that is not.

    python benchmarks/soak.py --out /tmp/soak                       # one GPU, about 8 minutes
    python benchmarks/soak.py --out /tmp/soak --cpu --steps 60 --stops 3 --every 10

A small model with chosen indices is trained twice. The second time it is killed at random moments
by SIGKILL, SIGTERM and SIGINT: while it compiles, between steps, while it saves. Once its disk is
full (no file may grow beyond a size), and once its data is replaced. Printed is a table of what
happened, and whether losses, files and memory are as they should be; the exit status is 1 if not.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.soak_checks import different_losses, left_behind, per_step, read_metrics
from benchmarks.soak_events import Event, Soaked, draw_events, half_saved, newest

VOCAB = 512
CONFIG = """\
[run]
steps = {steps}
output_dir = "{out}/runs"
compile_cache_dir = "{out}/compiled"
[model]
vocab_size = 512
hidden_size = {hidden}
num_layers = {layers}
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
{parallel}
[data]
source = "tokens"
paths = ["{out}/data/tokens.npy"]
seq_len = {seq_len}
[optimizer]
lr = 1e-3
[checkpoint]
every_steps = {every}
[metrics]
tensorboard = false
"""
GPU = {
    "hidden": 256, "layers": 4, "inner": 512, "seq_len": 8192, "dtype": "bfloat16", "block": 128,
    "parallel": "devices_per_node = 1",
}  # fmt: skip
CPU = {
    "hidden": 64, "layers": 2, "inner": 64, "seq_len": 256, "dtype": "float32", "block": 32,
    "parallel": "cpu_devices = 1\ndevices_per_node = 1",
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder to be made")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=100, help="steps between two checkpoints")
    parser.add_argument("--stops", type=int, default=10, help="random moments at which it is ended")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--kind", default="sampled_rows", help="pattern that chooses the index")
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the CPU")
    args = parser.parse_args(arguments)
    out = args.out.absolute()
    if out.exists():
        print(f"error: --out={out} exists; name a new folder", file=sys.stderr)
        return 2
    make_data(out / "data" / "tokens.npy", 500_000, seed=0)
    sizes = CPU if args.cpu else GPU
    (out / "soak.toml").write_text(
        CONFIG.format(steps=args.steps, every=args.every, kind=args.kind, out=out, **sizes)
    )
    failures = []
    for line in soak(out, args.steps, args.stops, args.seed, failures):
        print(line, flush=True)
    return 1 if failures else 0


def make_data(path: Path, tokens: int, seed: int) -> None:
    """Token ids of which each follows from the one before, mostly: easy to learn."""
    rng = np.random.default_rng(seed)
    follows = rng.permutation(VOCAB).astype(np.uint16)
    surprises = rng.random(tokens) < 0.1
    drawn = rng.integers(VOCAB, size=tokens)
    found = np.empty(tokens, np.uint16)
    token = 0
    for i in range(tokens):
        token = drawn[i] if surprises[i] else follows[token]
        found[i] = token
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new.npy")
    np.save(new, found)
    new.replace(path)


def soak(out: Path, steps: int, stops: int, seed: int, failures: list[str]) -> Iterator[str]:
    """Does it all.

    Args:
        out: with the configuration and the data; everything goes in there.
        steps: of the run.
        stops: random moments.
        seed: of the moments.
        failures: sentences are added to it.

    Yields:
        Lines to print, as Markdown.
    """
    begin = time.monotonic()
    whole = Soaked(out, "whole")
    status = whole.start().wait()
    yield f"uninterrupted: {steps} steps, exit status {status}, {time.monotonic() - begin:.0f} s"
    if status:
        failures.append("the uninterrupted run failed")
        yield whole.output()
        return
    yield ""
    yield "| event | when | ended by | exit status | seconds to its end | newest checkpoint |"
    yield "|---|---|---|---|---|---|"
    run = Soaked(out, "stopped")
    for number, event in enumerate(draw_events(steps, stops, np.random.default_rng(seed)), 1):
        yield _row(number, event, run, failures)
    begin = time.monotonic()
    status = run.start().wait()
    seconds = time.monotonic() - begin
    yield f"| {stops + 3} | the rest | | {status} | {seconds:.0f} | {run.newest()} |"
    if status:
        failures.append(f"the last start ended with status {status}")
    yield ""
    expected, found = (read_metrics(out / "runs" / name) for name in ("whole", "stopped"))
    wrong = different_losses(expected, found)
    yield f"losses that differ from those of the uninterrupted run: {len(wrong)} of {steps}"
    failures += [f"losses differ at steps {wrong[:5]}"] if wrong else []
    found_files = left_behind(out / "runs", {"whole", "stopped"})
    yield f"files left behind: {', '.join(found_files) or 'none'}"
    failures += [f"{name} was left behind" for name in found_files]
    slope, last = per_step(whole.memory) / 1024, whole.memory[-1][1] / 2**20
    yield f"memory of the process: {slope:+.2f} KiB a step, at its end {last:,.0f} MiB"
    used = [(r["step"], r["memory_bytes_in_use"]) for r in expected]
    if used[0][1] is not None:
        yield f"memory of the device: {per_step(used):+.1f} bytes a step"
        if per_step(used) > 1024:
            failures.append("memory of the device grows")
    if slope > 64 and steps >= 1000:  # in fewer, what warms up is most of it
        failures.append("memory of the process grows")
    yield ""
    yield "all as it should be" if not failures else "WRONG: " + "; ".join(failures)


def _row(number: int, event: Event, run: Soaked, failures: list[str]) -> str:
    """Lets an event happen, and checks how the process took it."""
    # The metrics so far fit, a checkpoint does not.
    limit = max(64 * 1024, 4 * run.metrics_size()) if event.kind == "disk" else None
    process = run.start(limit)
    if event.kind == "data":
        shutil.copy(run.data, run.data.with_name("kept.npy"))
        run.wait_for(event)
        make_data(run.data, 100_000, seed=1)
        process.kill()
        process.wait()
        status = run.start().wait()
        run.data.with_name("kept.npy").replace(run.data)
        allowed, seconds = (2,), 0.0
    else:
        at = run.wait_for(event)
        if event.signal is not None and process.poll() is None:
            process.send_signal(event.signal)
        status = process.wait()
        seconds = time.monotonic() - at
        # A process that was through before its moment came is as good.
        allowed = (event.status, 0) if event.signal is not None else (event.status,)
    if status not in allowed:
        failures.append(f"event {number} ({event}) ended with {status}\n{run.output()[-1500:]}")
    if "Traceback" in run.output() or "DEBUG:" in run.output():
        failures.append(f"event {number} ({event}) printed a traceback\n{run.output()[-1500:]}")
    name = "" if event.signal is None else event.signal.name
    half = " (one half written)" if half_saved(run.checkpoints) else ""
    return (
        f"| {number} | {event.kind}, after step {event.after} | {name} | {status} | {seconds:.1f} |"
        f" {newest(run.checkpoints)}{half} |"
    )


if __name__ == "__main__":
    sys.exit(main())
