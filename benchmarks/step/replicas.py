r"""Times even groups on one GPU: each group of a step by itself, one after the other.

    python -m benchmarks.step.replicas --out RESULT.md

Groups of devices meet once a step, so a step takes what its slowest group takes. This runs what
each group would, as the training step of one group, and combines the times so; what the groups'
meeting itself takes is not in it. Batches are drawn as in `benchmarks/balance.py`, by which the
densities of documents and what shares of mass do to them are given (`drawn_lists.py`), and all
orders have the same batches. Beside each time stands the one that is predicted: attention by the
table in `mtraining_jax/latency.py`, the rest of a step by the dry run. With --predict only these
are printed, on any machine.

On a CPU in miniature: --config tiny --groups 2 --parts 2 --documents 300 1800 --start 1.3
--parallel.nodes=1 --parallel.devices_per_node=1 --data.seq_len=2048 --sparsity.dense_below=512
"""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.step import balance
from benchmarks.step.balance import Setting
from benchmarks.step.drawn_lists import DrawnLists
from benchmarks.step.group_report import (
    COST_COLUMNS,
    conclusions,
    forecasts,
    introduction,
    is_comparable,
    off_by,
    row,
    table_head,
    table_line,
)
from benchmarks.step.group_steps import ORDERS, Found, chosen_batches, dealt_batches, predicted
from benchmarks.step.group_times import Groups
from mtraining_jax.config import Config, load_config
from mtraining_jax.errors import UserError
from mtraining_jax.jax_platform import set_platform
from mtraining_jax.training.build import build_mesh

# Unless told otherwise: a cut model, so that many steps take little time.
_SMALL = {"data.seq_len": 131072, "model.num_layers": 6, "model.vocab_size": 32768}
_COUNTED = "length"  # the order whose groups run with and without counting pairs


def report(args: argparse.Namespace, run: Setting, config: Config) -> Iterator[str]:
    """Lines of the markdown, as they come.

    Args:
        args: of the command.
        run: of several groups.
        config: of that run.
    """
    batches = chosen_batches(run, args.seed, args.batches, args.start, args.documents)
    dealt = dealt_batches(*batches, run)
    if args.predict:
        yield from forecasts(
            {
                how: [Found.of(predicted(step, run)) for step in steps]
                for how, steps in dealt.items()
            }
        )
        return
    mesh = build_mesh(run.config)
    yield from introduction(args, run)
    print("compiling two training steps ...", file=sys.stderr, flush=True)
    begin = time.perf_counter()
    groups = Groups(run, config, mesh, args.repeats)
    print(f"compiled in {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    found: dict[str, list[tuple[Found, Found]]] = {how: [] for how in ORDERS}
    costs: list[list[float]] = []
    for number in range(args.batches):
        for how in ORDERS:
            step = dealt[how][number]
            if how == _COUNTED:  # in turn, as the speed of a GPU drifts
                for packs, shares in zip(step.groups, step.shares, strict=True):
                    for counting in (False, True):
                        groups.step_ms(packs, shares, counting)
            real = groups.measure(step, counting=how != "none")
            found[how].append((Found.of(predicted(step, run)), Found.of(real)))
            yield row(str(number + 1), how, found[how][-1], found["none"][-1], is_comparable())
            if how == _COUNTED:
                plain = groups.measure(step, counting=False)
                costs.append([plain.step_ms.sum() / 1e3, real.step_ms.sum() / 1e3])
    means = {
        how: [Found.mean(side) for side in zip(*pairs, strict=True)] for how, pairs in found.items()
    }
    for how, both in means.items():
        yield row("mean", how, both, means["none"], is_comparable())
    yield from ["", f"The groups of `{_COUNTED}`, their times added up:", ""]
    yield from table_head(COST_COLUMNS)
    for number, (without, counting) in enumerate(costs, 1):
        cost = off_by(without, counting)
        yield table_line(str(number), f"{without:.3f}", f"{counting:.3f}", cost)
    if is_comparable():
        yield from ["", *conclusions(found, [after / before - 1 for before, after in costs])]


def main(argv: list[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="qwen0_5b_512k")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--parts", type=int, default=4, help="packs of a group in a step")
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--start", type=float, default=balance.START)
    parser.add_argument("--documents", type=int, nargs=2, default=list(balance.MEANS),
                        metavar=("SHORT", "LONG"), help="their tokens, in the mean")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=5, help="of attention alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--predict", action="store_true", help="run nothing, print predictions")
    parser.add_argument("--out", type=Path, help="file for the tables")
    args, overrides = parser.parse_known_args(argv)
    lines = []
    try:
        for name, least in (("groups", 2), ("parts", 1), ("batches", 1), ("repeats", 1)):
            if getattr(args, name) < least:
                raise UserError(f"--{name}={getattr(args, name)}: allowed is {least} or more")
        if min(args.documents) < 2:
            raise UserError(f"--documents={min(args.documents)}: allowed are 2 tokens or more")
        run, config = configured(args, overrides)
        set_platform(run.config.parallel.cpu_devices)
        for line in report(args, run, config):
            lines.append(line)
            print(line, flush=True)
            if args.out is not None:
                args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except UserError as error:
        parser.error(str(error))


def configured(args: argparse.Namespace, overrides: Sequence[str]) -> tuple[Setting, Config]:
    """One group alone, and the run of all groups.

    Raises:
        UserError: a field is given that the options decide, or a group has several devices.
    """
    given = dict(text.removeprefix("--").partition("=")[::2] for text in overrides)
    group = {
        "data.documents": True, "data.batch_size": args.parts,
        "optimizer.accumulation_steps": args.parts, "parallel.data": 1,
        "sparsity.kind": f"{DrawnLists.__module__}:{DrawnLists.__name__}",
        "sparsity.draw": args.seed, "sparsity.block_size": balance.BLOCK,
    }  # fmt: skip
    whole = {
        "data.batch_size": args.groups * args.parts, "parallel.data": args.groups,
        "data.balance": "length",
    }  # fmt: skip
    if taken := sorted(given.keys() & (group | whole).keys()):
        raise UserError(
            f"{taken[0]}={given[taken[0]]} is not to be given here: --groups, --parts and --seed "
            "say it, or nothing does"
        )
    small = {} if args.config != "qwen0_5b_512k" else _SMALL | {"parallel.devices_per_node": 1}

    def load(more: Mapping[str, object]) -> Config:
        fields = small | given | group | more
        return load_config(args.config, [(name, _text(value)) for name, value in fields.items()])

    alone = load({})
    if alone.ranks != 1:
        raise UserError(
            f"parallel.nodes={alone.parallel.nodes}, parallel.devices_per_node="
            f"{alone.parallel.devices_per_node}: a group has one device here, allowed is 1 and 1"
        )
    return Setting(alone, args.groups, args.parts), load(whole)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    main()
