r"""Compares ways to balance packs over data-parallel replicas, predicted and measured on one GPU.

    python -m benchmarks.step.replicas --out RESULT.md
    python -m benchmarks.step.replicas --predict --config qwen3b_512k --batches 200 --start 0 \
        --data.seq_len=524288 --parallel.devices_per_node=8

A step takes as long as its slowest replica. This takes the training step of each replica, one after
another on one device, and combines the times; communication between replicas is not included. All
orders have the same batches (`drawn_batches.py`), with random lists of given densities
(`drawn_lists.py`). Predictions use `mtraining_jax/cost_model/kernel_times.py` for attention, and the dry run
for the rest of a step. --predict prints them only, on any machine and for replicas of any size.

A small trial on a CPU: --config tiny --groups 2 --parts 2 --documents 300 1800 --start 1.3
--parallel.nodes=1 --parallel.devices_per_node=1 --data.seq_len=2048 --sparsity.min_sparse_tokens=512
"""

import argparse
import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from benchmarks.options import make_parser, overrides
from benchmarks.report import Page, setting, table_head, table_line
from benchmarks.step.drawn_batches import (
    BOUNDS,
    MEANS,
    ORDERS,
    START,
    TUNED,
    WARM,
    Run,
    Times,
    assign,
    draw_batches,
    predicted,
)
from benchmarks.step.drawn_lists import BLOCK, DrawnLists
from benchmarks.step.replica_times import ReplicaTimer
from benchmarks.timing import log
from mtraining_jax.config import Config, load_config
from mtraining_jax.data.balance import imbalance
from mtraining_jax.training.build import build_mesh
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.jax_platform import set_platform

# Default: a cut model, so that many steps take little time.
_CUT = {
    "data.seq_len": 131072, "model.num_layers": 6, "model.vocab_size": 32768,
    "parallel.devices_per_node": 1,
}  # fmt: skip
_MAX_ROWS = 10  # batches with a row each; of more, only means are printed


@dataclasses.dataclass(frozen=True)
class Found:
    """One step that waits for its slowest replica, or the means over several.

    Attributes:
        density: computed over causal pairs within documents.
        attention, step: imbalance, slowest replica over the mean.
        attention_ms, step_ms: of the slowest replica.
        rest_ms: of a step outside attention, mean over replicas.
    """

    density: float
    attention: float
    step: float
    attention_ms: float
    step_ms: float
    rest_ms: float

    @classmethod
    def of(cls, times: Times) -> "Found":
        """One step."""
        count = times.step_ms.size
        return cls(
            times.density,
            imbalance(times.attention_ms, count),
            imbalance(times.step_ms, count),
            float(times.attention_ms.max()),
            float(times.step_ms.max()),
            float((times.step_ms - times.attention_ms).mean()),
        )

    @classmethod
    def mean(cls, found: "Sequence[Found]") -> "Found":
        """Several steps."""
        return cls(*np.mean([dataclasses.astuple(each) for each in found], axis=0).tolist())


# Name, format, and value of a step given the step in data order.
_METRICS = (
    ("density", "{:.4f}", lambda step, plain: step.density),
    ("attention imbalance", "{:.2f}", lambda step, plain: step.attention),
    ("step imbalance", "{:.3f}", lambda step, plain: step.step),
    ("attention of the slowest, ms", "{:.0f}", lambda step, plain: step.attention_ms),
    ("rest, ms", "{:.0f}", lambda step, plain: step.rest_ms),
    ("step, s", "{:.3f}", lambda step, plain: step.step_ms / 1e3),
    ("speedup", "{:.2f} x", lambda step, plain: plain.step_ms / step.step_ms),
)


def columns(measured: bool) -> list[str]:
    """Names of the columns: predictions, each followed by the measured value if there is one."""
    names = ["batch", "data.balance"]
    for name, _, _ in _METRICS:
        names += [f"{name}, predicted", "measured"] if measured else [name]
    return [*names, "step off"] if measured else names


def row(name: str, how: str, found: Sequence[Found], plain: Sequence[Found]) -> list[str]:
    """Cells of the table; `found` is predicted, and measured if it was, `plain` in data order."""
    cells = [name, how]
    for _, form, value in _METRICS:
        cells += [form.format(value(*pair)) for pair in zip(found, plain, strict=True)]
    if len(found) > 1:
        cells.append(f"{found[1].step_ms / found[0].step_ms - 1:+.1%}")
    return cells


def write(args: argparse.Namespace, run: Run, config: Config, page: Page) -> None:
    """Adds the table to the page."""
    warm, batches = draw_batches(run, args.seed, args.batches, args.start, args.documents)
    steps = assign(warm, batches, run)
    timer = None
    if not args.predict:
        mesh = build_mesh(run.config)
        log("compiling the training step")
        timer = ReplicaTimer(run, config, mesh, args.repeats)
    page.add(*_introduction(args, run), "", *table_head(columns(timer is not None)))
    found: dict[str, list[list[Found]]] = {how: [] for how in ORDERS}
    for number in range(args.batches):
        for how in ORDERS:
            step = steps[how][number]
            times = [predicted(step, run)]
            if timer is not None:
                times.append(timer.measure(step))
            found[how].append([Found.of(x) for x in times])
            if args.batches <= _MAX_ROWS:
                plain = found[ORDERS[0]][number]
                page.add(table_line(row(str(number + 1), how, found[how][number], plain)))
    means = {how: [Found.mean(x) for x in zip(*each, strict=True)] for how, each in found.items()}
    for how, mean in means.items():
        page.add(table_line(row("mean", how, mean, means[ORDERS[0]])))


def _introduction(args: argparse.Namespace, run: Run) -> list[str]:
    model, data = run.config.model, run.config.data
    start = f"a predicted attention imbalance of {args.start} +- 0.05 in data order"
    lines = [
        "# Balance of data-parallel replicas",
        "",
        f"{setting()}, {jax.devices()[0].device_kind}. {run.config.run.name} with "
        f"{model.num_layers} layers and a vocabulary of {model.vocab_size}, {model.num_heads}/"
        f"{model.num_kv_heads} heads of {model.head_dim}, {model.dtype}, remat {model.remat}, "
        f"random weights. {run.replicas} replicas of {run.packs} packs of {data.seq_len} tokens, "
        f"documents of {args.documents[0]} and {args.documents[1]} tokens on average, seed "
        f"{args.seed}; {args.batches} batches" + (f" with {start}." if args.start else "."),
        "",
        f"Pairs are drawn, not selected. For `{TUNED}` the effect of mass fractions "
        f"({BOUNDS.low} to {BOUNDS.high}) on densities is given too, the same in all layers. The "
        f"averages had seen {WARM} batches before. Predicted: attention on H200s by the table in "
        "`mtraining_jax/cost_model/kernel_times.py`, the rest of a step by the dry run. Speedup: "
        "over `none`.",
    ]
    if not args.predict:
        lines += [
            "",
            "**No two replicas ran at the same time.** Each ran as the training step of one "
            "replica on one device; the sum of gradients over replicas is not included. Each step "
            "was timed once, after others of its program. Attention was timed separately: one "
            f"layer of each pack (median of {args.repeats}) with the drawing of its lists, times "
            "the number of layers. Off: measured over predicted, minus 1.",
        ]
    return lines


def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    parser = make_parser(__doc__, "seed", "out")
    parser.add_argument("--config", default="qwen0_5b_512k")
    parser.add_argument("--groups", type=int, default=4, help="data-parallel replicas")
    parser.add_argument("--parts", type=int, default=4, help="packs of a replica per step")
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument(
        "--start",
        type=float,
        default=START,
        help="attention imbalance of the batches in data order; 0: any",
    )
    parser.add_argument(
        "--documents",
        type=int,
        nargs=2,
        default=list(MEANS),
        metavar=("SHORT", "LONG"),
        help="tokens of short and long documents on average",
    )
    parser.add_argument("--repeats", type=int, default=5, help="runs per median of attention")
    parser.add_argument("--predict", action="store_true", help="print predictions only")
    args, fields = parser.parse_known_args(argv)
    try:
        for name, least in (("groups", 2), ("parts", 1), ("batches", 1), ("repeats", 1)):
            if getattr(args, name) < least:
                raise UserError(f"--{name}={getattr(args, name)} must be at least {least}")
        if min(args.documents) < 2:
            raise UserError(f"--documents={min(args.documents)} must be at least 2 tokens")
        run, config = configured(args, fields)
        set_platform(run.config.parallel.cpu_devices)
        write(args, run, config, Page(args.out))
    except UserError as error:
        parser.error(str(error))


def configured(args: argparse.Namespace, fields: Sequence[str]) -> tuple[Run, Config]:
    """The run with the configuration of one replica, and the configuration of all replicas.

    Raises:
        UserError: if a field is given that the options set, or a replica to time has several
            devices.
    """
    given = dict(overrides(fields))
    replica = {
        "data.mask_documents": "true", "data.batch_size": args.parts,
        "optimizer.accumulation_steps": args.parts, "parallel.replicas": 1,
        "sparsity.kind": f"{DrawnLists.__module__}:{DrawnLists.__name__}",
        "sparsity.draw": args.seed, "sparsity.block_size": BLOCK,
    }  # fmt: skip
    whole = {
        "data.batch_size": args.groups * args.parts, "parallel.replicas": args.groups,
        "data.balance": "length",
    }  # fmt: skip
    if taken := sorted(given.keys() & (replica | whole).keys()):
        raise UserError(
            f"{taken[0]}={given[taken[0]]} cannot be set here; use --groups, --parts and --seed"
        )
    cut = _CUT if args.config == "qwen0_5b_512k" else {}

    def load(more: dict[str, object]) -> Config:
        pairs = (cut | given | replica | more).items()
        return load_config(args.config, [(name, str(value)) for name, value in pairs])

    alone = load({})
    if alone.ranks != 1 and not args.predict:
        raise UserError(
            f"parallel.nodes={alone.parallel.nodes}, parallel.devices_per_node="
            f"{alone.parallel.devices_per_node}: a timed replica must have one device"
        )
    return Run(alone, args.groups, args.parts), load(whole)


if __name__ == "__main__":
    main()
