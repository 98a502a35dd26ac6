r"""Compares ways to balance packs over data-parallel replicas, predicted and measured on one GPU.

    python -m benchmarks.step.replicas --out RESULT.md
    python -m benchmarks.step.replicas --predict --config qwen3b_512k --batches 200 --start 0 \
        --data.seq_len=524288 --parallel.devices_per_node=8

A step takes as long as its slowest replica. This takes the training step of each replica, one after
another on one device, and combines the times; communication between replicas is not included. All
orders have the same batches (`drawn_batches.py`), with random lists of given densities
(`drawn_lists.py`). Predictions use `mtraining_jax/tools/plan/kernel_times.py` for attention, and
the dry run for the rest of a step. --predict prints them only, on any machine and for replicas of
any size.

A small trial on a CPU: --config tiny --groups 2 --parts 2 --documents 300 1800 --start 1.3
--parallel.nodes=1 --parallel.devices_per_node=1 --data.seq_len=2048
--sparsity.min_sparse_tokens=512
"""

import argparse
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from benchmarks.options import at_least, make_parser, overrides
from benchmarks.report import Page, number, setting, table_head, table_line
from benchmarks.step.compiled_step import CompiledStep
from benchmarks.step.drawn_batches import (
    MEANS,
    ORDERS,
    START,
    WARM,
    Pack,
    Run,
    draw_batches,
    ordered,
)
from benchmarks.step.drawn_lists import BLOCK, DrawnLists
from benchmarks.timing import log
from mtraining_jax.config import Config
from mtraining_jax.data.balance import imbalance
from mtraining_jax.documents import Documents
from mtraining_jax.models.labels import IGNORE_LABEL
from mtraining_jax.training.build import build_attention, build_layout, build_mesh, build_pattern
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.jax_platform import set_platform

# Default: a cut model, so that many steps take little time.
_CUT = {
    "data.seq_len": 131072, "model.num_layers": 6, "model.vocab_size": 32768,
    "parallel.devices_per_node": 1,
}  # fmt: skip
_MAX_ROWS = 10  # batches with a row each; of more, only means are printed
_COLUMNS = (
    "batch", "data.balance", "density", "attention imbalance, predicted", "step s, predicted",
    "measured", "off", "step imbalance, measured", "speedup, predicted", "measured",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Found:
    """One step, or the means over several.

    Attributes:
        density: computed over causal pairs within documents, mean over packs.
        attention_imbalance: slowest replica over the mean, predicted.
        predicted_s, measured_s: of the slowest replica; nan if not measured.
        step_imbalance: measured; nan if not.
    """

    density: float
    attention_imbalance: float
    predicted_s: float
    measured_s: float = float("nan")
    step_imbalance: float = float("nan")

    @classmethod
    def mean(cls, found: "Sequence[Found]") -> "Found":
        """Several steps."""
        return cls(*np.mean([dataclasses.astuple(each) for each in found], axis=0).tolist())

    def row(self, batch: str, how: str, plain: "Found") -> str:
        """Its row of the table; `plain` is the same step in data order."""
        measured = not np.isnan(self.measured_s)
        return table_line([
            batch, how, f"{self.density:.4f}", f"{self.attention_imbalance:.2f}",
            f"{self.predicted_s:.3f}", number(self.measured_s if measured else None, 3),
            f"{self.measured_s / self.predicted_s - 1:+.1%}" if measured else "–",
            number(self.step_imbalance if measured else None, 3),
            f"{plain.predicted_s / self.predicted_s:.2f} x",
            f"{plain.measured_s / self.measured_s:.2f} x" if measured else "–",
        ])  # fmt: skip


class ReplicaTimer:
    """Takes the training step of one replica for each replica; equal replicas are timed once.

    Args:
        run: of several replicas.
        config: of that run; its attention counts pairs by document length.
        mesh: of one device.
    """

    def __init__(self, run: Run, config: Config, mesh: Mesh) -> None:
        self._run, data = run, run.config.data
        self._text = np.random.default_rng(0).integers(
            0, run.config.model.vocab_size, (run.packs, data.seq_len + 1), np.int32
        )
        first = self._batch([Pack(np.array([2]), np.ones(1))] * run.packs)
        attention = build_attention(
            config, mesh, build_layout(run.config), build_pattern(run.config)
        )
        self._step = CompiledStep(run.config, mesh, first, attention)
        self._state = StateBuilder(run.config, mesh).fresh()
        self._seconds: dict[tuple[int, ...], float] = {}
        self._take(first)

    def seconds(self, packs: Sequence[Pack]) -> float:
        """Time of a replica's step."""
        key = tuple(map(id, packs))
        if key not in self._seconds:
            self._seconds[key] = self._take(jax.block_until_ready(self._batch(packs)))
        return self._seconds[key]

    def _take(self, batch: dict[str, Array]) -> float:
        state = jax.tree.map(lambda x: x.copy(), self._state)
        return self._step.run(state, [batch]).seconds

    def _batch(self, packs: Sequence[Pack]) -> dict[str, Array]:
        """The batch of a replica, with random tokens, in the form that `DeviceBatches` returns."""
        seq_len = self._run.config.data.seq_len
        documents = Documents.from_lengths([pack.lengths for pack in packs], seq_len, BLOCK)
        blocks = jnp.arange(seq_len // BLOCK)
        followed = documents.positions(blocks) + 1 < documents.lengths(blocks)
        return {
            "tokens": jnp.asarray(self._text[:, :-1]),
            "labels": jnp.where(followed, self._text[:, 1:], IGNORE_LABEL),
            "documents": jax.tree.map(jnp.asarray, documents),
        }


def found_of(run: Run, batch: Sequence[Pack], timer: ReplicaTimer | None) -> Found:
    """The step of a batch; its packs are in the order of replicas."""
    replicas = run.split(batch)
    attention_ms = np.array([run.attention_ms(packs) for packs in replicas])
    found = Found(
        float(np.mean([pack.density() for pack in batch])),
        imbalance(attention_ms, run.replicas),
        (attention_ms.max() + run.rest_ms) / 1e3,
    )
    if timer is None:
        return found
    measured = np.array([timer.seconds(packs) for packs in replicas])
    return dataclasses.replace(
        found, measured_s=measured.max(), step_imbalance=imbalance(measured, run.replicas)
    )


def write(args: argparse.Namespace, run: Run, config: Config, page: Page) -> None:
    """Adds the table to the page."""
    warm, batches = draw_batches(run, args.seed, args.batches, args.start, args.documents)
    orders = {how: list(ordered([*warm, *batches], how, run))[WARM:] for how in ORDERS}
    timer = None
    if not args.predict:
        log("compiling the training step")
        timer = ReplicaTimer(run, config, build_mesh(run.config))
    page.add(*_introduction(args, run), "", *table_head(_COLUMNS))
    found: dict[str, list[Found]] = {how: [] for how in ORDERS}
    for batch in range(args.batches):
        for how in ORDERS:
            found[how].append(found_of(run, orders[how][batch], timer))
            if args.batches <= _MAX_ROWS:
                page.add(found[how][-1].row(str(batch + 1), how, found["none"][-1]))
    means = {how: Found.mean(each) for how, each in found.items()}
    page.add(*(mean.row("mean", how, means["none"]) for how, mean in means.items()))


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
        f"Pairs are drawn, not selected. The averages had seen {WARM} batches before. Predicted: "
        "attention on H200s by the table in `mtraining_jax/tools/plan/kernel_times.py`, the rest "
        "of a step by the dry run. Speedup: over `none`.",
    ]
    if not args.predict:
        lines += [
            "",
            "**No two replicas ran at the same time.** Each ran as the training step of one "
            "replica on one device; the sum of gradients over replicas is not included. Each step "
            "was timed once, after others of its program. Off: measured over predicted, minus 1.",
        ]
    return lines


def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    parser = make_parser(__doc__, "seed", "out")
    parser.add_argument("--config", default="qwen0_5b_512k")
    parser.add_argument("--groups", type=at_least(2), default=4, help="data-parallel replicas")
    parser.add_argument("--parts", type=at_least(1), default=4, help="packs of a replica per step")
    parser.add_argument("--batches", type=at_least(1), default=3)
    parser.add_argument(
        "--start", type=float, default=START,
        help="attention imbalance of the batches in data order; 0: any",
    )  # fmt: skip
    parser.add_argument(
        "--documents", type=at_least(2), nargs=2, default=list(MEANS), metavar=("SHORT", "LONG"),
        help="tokens of short and long documents on average",
    )  # fmt: skip
    parser.add_argument("--predict", action="store_true", help="print predictions only")
    args, fields = parser.parse_known_args(argv)
    try:
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
    given = overrides(fields)
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
        return Config.load(args.config, cut | given | replica | more)

    alone = load({})
    if alone.ranks != 1 and not args.predict:
        raise UserError(
            f"parallel.nodes={alone.parallel.nodes}, parallel.devices_per_node="
            f"{alone.parallel.devices_per_node}: a timed replica must have one device"
        )
    return Run(alone, args.groups, args.parts), load(whole)


if __name__ == "__main__":
    main()
