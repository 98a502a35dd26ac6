r"""Times even groups on one GPU: each group of a step by itself, one after the other.

    python -m benchmarks.groups --out RESULT.md

Groups of devices meet once a step, so a step takes what its slowest group takes. This runs what
each group would, as the training step of one group, and combines the times so; what the groups'
meeting itself takes is not in it. Batches are drawn as in `benchmarks/balance.py`, by which the
densities of documents and what shares of mass do to them are given (`drawn_lists.py`), and all
orders have the same batches. Beside each time stands the one that is predicted: attention by the
table in `mtraining_jax/latency.py`, the rest of a step by the dry run.

On a CPU in miniature: --config tiny --groups 2 --parts 2 --documents 300 1800 --start 1.3
--parallel.nodes=1 --parallel.devices_per_node=1 --data.seq_len=2048 --sparsity.dense_below=512
"""

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from benchmarks import balance
from benchmarks.balance import Pack, Setting
from benchmarks.drawn_lists import DrawnLists, densities_by_length
from benchmarks.report import setting
from benchmarks.step_patterns import Step
from benchmarks.timing import median_ms
from mtraining_jax.config import Config, load_config
from mtraining_jax.data.balance import imbalance
from mtraining_jax.data.loader import IGNORE_LABEL
from mtraining_jax.data.packs import block_table
from mtraining_jax.errors import UserError
from mtraining_jax.platform import set_platform
from mtraining_jax.training import parts
from mtraining_jax.training.documents import attention_within, restarting_positions
from mtraining_jax.training.state import StateBuilder

# Unless told otherwise: a cut model, so that many steps take little time.
_SMALL = {"data.seq_len": 131072, "model.num_layers": 6, "model.vocab_size": 32768}
_TRIES = 400  # batches that are drawn to find some
ORDERS = ("none", "length", "density", balance.TUNED)
_COUNTED = "length"  # the order whose groups run with and without counting pairs
# What was set before: imbalance of attention, error of a step's time, own cost.
_IMBALANCE, _ERROR, _COST = 1.34, 0.05, 0.015
_COLUMNS = (
    "batch", "data.balance", "density drawn", "computed", "imbalance of attention predicted",
    "measured", "of the step predicted", "measured", "attention of the busiest group, ms predicted",
    "measured", "off", "step, s predicted", "measured", "off", "faster predicted", "measured",
)  # fmt: skip
_COST_COLUMNS = "batch", "without counting, s", "counting pairs by length, s", "own cost"


@dataclasses.dataclass(frozen=True)
class Dealt:
    """A step whose packs were dealt to its groups.

    Attributes:
        groups: the packs of each group, with the densities that they are to compute.
        shares: float64 [M, L], the share of mass that each group keeps in each layer.
    """

    groups: list[list[Pack]]
    shares: np.ndarray


@dataclasses.dataclass(frozen=True)
class Times:
    """Of the groups of one step, each by itself.

    Attributes:
        attention_ms: float64 [M], attention alone, forward and backward, in all layers.
        step_ms: float64 [M], the whole step.
        density: computed over causal pairs within documents, mean over packs.
    """

    attention_ms: np.ndarray
    step_ms: np.ndarray
    density: float


@dataclasses.dataclass(frozen=True)
class Found:
    """What a step is that waits for its slowest group: means over steps.

    Attributes:
        attention, step: imbalance: the busiest group over the mean of all.
        attention_ms, step_ms: of the busiest group.
        rest_ms: of a step but its attention, mean over groups.
        density: computed over causal pairs within documents.
    """

    attention: float
    step: float
    attention_ms: float
    step_ms: float
    rest_ms: float
    density: float

    @classmethod
    def of(cls, times: Times) -> "Found":
        """One step."""
        groups = times.step_ms.size
        return cls(
            attention=imbalance(times.attention_ms, groups),
            step=imbalance(times.step_ms, groups),
            attention_ms=float(times.attention_ms.max()),
            step_ms=float(times.step_ms.max()),
            rest_ms=float((times.step_ms - times.attention_ms).mean()),
            density=times.density,
        )

    @classmethod
    def mean(cls, found: "Sequence[Found]") -> "Found":
        """Several steps."""
        return cls(*np.mean([dataclasses.astuple(each) for each in found], axis=0).tolist())


def chosen_batches(
    run: Setting, seed: int, count: int, start: float, means: Sequence[int]
) -> tuple[list[Sequence[Pack]], list[Sequence[Pack]]]:
    """Batches from which averages are learned, and those to run.

    Args:
        run: it.
        seed: of documents and densities.
        count: of batches to run.
        start: imbalance of attention that these have in the order of the data, within 0.05.
        means: tokens of short and of long documents.

    Raises:
        UserError: not enough of the batches that are drawn start there.
    """
    rng, seq_len = np.random.default_rng(seed), run.config.data.seq_len
    table = densities_by_length(seed, seq_len, run.dense_below)

    def known(pack: Pack) -> Pack:
        # The device knows a document's density by its length. So those that fill a pack end
        # somewhere in their last block, and do not all have one density.
        full = pack.lengths == seq_len
        lengths = pack.lengths - full * rng.integers(0, balance.BLOCK, pack.lengths.shape)
        return Pack(lengths, table[lengths])

    drawn = balance.drawn(rng, run, balance.WARM + _TRIES, means)
    drawn = [[known(pack) for pack in batch] for batch in drawn]
    warm, others = drawn[: balance.WARM], drawn[balance.WARM :]
    found = balance.starting_at(others, run, start)
    if len(found) < count:
        raise UserError(
            f"--batches={count}: {len(found)} of {len(others)} drawn batches begin at an imbalance "
            f"of attention of {start} +- 0.05, and no more may be asked for; another --start, "
            "--groups, --parts or --documents would do"
        )
    return warm, found[:count]


def dealt_batches(
    warm: Sequence[Sequence[Pack]], batches: Sequence[Sequence[Pack]], run: Setting
) -> dict[str, list[Dealt]]:
    """Each batch in each of `ORDERS`, as a run has it that took the steps of `warm` before."""
    every = [*warm, *batches]
    tuning = balance.Tuning(run, np.random.default_rng(0), spread=0.0)
    orders = {how: list(balance.dealt(every, how, run)) for how in ORDERS[:-1]}
    orders[balance.TUNED] = list(tuning.apply(orders["length"]))
    configured = np.full((run.groups, run.config.model.num_layers), balance.BOUNDS.base)
    shares = {how: [configured] * len(every) for how in orders} | {balance.TUNED: tuning.kept}
    return {
        how: [
            Dealt([batch[m : m + run.parts] for m in range(0, len(batch), run.parts)], kept)
            for batch, kept in zip(steps[len(warm) :], shares[how][len(warm) :], strict=True)
        ]
        for how, steps in orders.items()
    }


def predicted(dealt: Dealt, run: Setting) -> Times:
    """By the table of rates and the dry run, with the densities that are to be computed."""
    attention = np.array([balance.times(packs, run.size).sum() for packs in dealt.groups])
    density = np.mean([_density(pack) for packs in dealt.groups for pack in packs])
    return Times(attention, attention + run.rest_ms, float(density))


def _density(pack: Pack) -> float:
    padded = -(-pack.lengths // balance.BLOCK) * balance.BLOCK
    return float(np.average(pack.densities, weights=padded * (padded + 1.0)))


class Groups:
    """Runs groups one after the other on one device; no group runs twice that is the same.

    Args:
        run: of several groups.
        config: of that run, whose attention counts pairs by length; `run.config` is one group's.
        mesh: of one device.
        repeats: of attention alone.
    """

    def __init__(self, run: Setting, config: Config, mesh: Mesh, repeats: int) -> None:
        self._run, self._repeats, self._mesh = run, repeats, mesh
        self._restart = restarting_positions(mesh, balance.BLOCK)
        self._text = np.random.default_rng(0).integers(
            0, run.config.model.vocab_size, (run.parts, run.config.data.seq_len + 1), np.int32
        )
        self._attention = _attention_alone(run.config, mesh)
        self._inputs = _random_inputs(run.config)
        self._times: dict[tuple, tuple[float, float]] = {}
        self._attention_ms: dict[tuple, float] = {}
        first = self._batch([Pack(np.array([2]), np.ones(1))] * run.parts, self._units(1.0))
        ways = {True: config, False: None}
        with ThreadPoolExecutor(len(ways)) as pool:
            compiling = {
                way: pool.submit(Step, run.config, mesh, first, whole)
                for way, whole in ways.items()
            }
        self._steps = {way: step.result() for way, step in compiling.items()}
        self._state = StateBuilder(run.config, mesh).fresh()
        for step in self._steps.values():
            step.run(self._state, [first])

    def measure(self, dealt: Dealt, counting: bool) -> Times:
        """Times of all groups of a step.

        Args:
            dealt: it.
            counting: whether pairs are counted by the length of documents.
        """
        attention, steps, densities = [], [], []
        for packs, shares in zip(dealt.groups, dealt.shares, strict=True):
            ms, density = self.step_ms(packs, shares, counting)
            steps.append(ms)
            densities.append(density)
            attention.append(sum(self._alone_ms(pack, float(shares.mean())) for pack in packs))
        return Times(np.array(attention), np.array(steps), float(np.mean(densities)))

    def step_ms(
        self, packs: Sequence[Pack], shares: np.ndarray, counting: bool
    ) -> tuple[float, float]:
        """Time of one group's step, and the density that it computed."""
        units = self._units(shares)
        # Tuning changes the densities of a pack, and not which it is.
        key = counting, units.tobytes(), *(id(pack.lengths) for pack in packs)
        if key not in self._times:
            batch = jax.block_until_ready(self._batch(packs, units))
            found = self._steps[counting].run(self._state, [batch])
            self._times[key] = 1e3 * found.seconds, found.density
        return self._times[key]

    def _alone_ms(self, pack: Pack, share: float) -> float:
        """Attention of one pack in all layers, which are alike: one of them, many times."""
        units = self._units(share)[:, 0]
        key = id(pack.lengths), units.tobytes()
        if key not in self._attention_ms:
            table = jnp.asarray(self._table(pack)[None])
            run = functools.partial(self._attention, *self._inputs, table, jnp.asarray(units[:1]))
            layers = self._run.config.model.num_layers
            self._attention_ms[key] = layers * median_ms(run, self._repeats)
        return self._attention_ms[key]

    def _units(self, shares: np.ndarray | float) -> np.ndarray:
        """Shares [L] as `Shards` has them, for each pack of a group: int32 [parts, L]."""
        scale = 1 << DrawnLists().kept_share().bits
        units = np.rint(np.asarray(shares) * scale).astype(np.int32)
        return np.broadcast_to(units, (self._run.parts, self._run.config.model.num_layers))

    def _table(self, pack: Pack) -> np.ndarray:
        num_blocks = self._run.config.data.seq_len // balance.BLOCK
        return block_table(pack.lengths, balance.BLOCK, num_blocks)

    def _batch(self, packs: Sequence[Pack], units: np.ndarray) -> dict[str, Array]:
        """A group's batch as `parts.Batches` would give it, of random tokens."""
        tables = np.stack([self._table(pack) for pack in packs])
        first, _, tokens = np.repeat(tables, balance.BLOCK, axis=1).transpose(2, 0, 1)
        places = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        followed = places - first * balance.BLOCK + 1 < tokens
        table = jnp.asarray(tables)
        return {
            "tokens": jnp.asarray(self._text[:, :-1]),
            "labels": jnp.asarray(np.where(followed, self._text[:, 1:], IGNORE_LABEL)),
            "positions": self._restart(jnp.asarray(places), table),
            "documents": table,
            "shares": jnp.asarray(units),
        }


def _attention_alone(config: Config, mesh: Mesh) -> Callable[..., tuple[Array, ...]]:
    """(q, k, v, dout, table, shares) -> gradients: one layer's attention, compiled."""
    layout, pattern = parts.build_layout(config), parts.build_pattern(config)
    attention = parts.build_attention(config, mesh, layout, pattern)

    @jax.jit
    def alone(
        q: Array, k: Array, v: Array, dout: Array, table: Array, shares: Array
    ) -> tuple[Array, ...]:
        attend = attention_within(attention, {"documents": table})
        _, back = jax.vjp(lambda *inputs: attend(*inputs, shares=shares)[0], q, k, v)
        return back(dout)

    return alone


def _random_inputs(config: Config) -> list[Array]:
    """q, k, v and dout of one sequence."""
    model, seq_len = config.model, config.data.seq_len
    heads = model.num_heads, model.num_kv_heads, model.num_kv_heads, model.num_heads
    keys = jax.random.split(jax.random.key(0), len(heads))
    return [
        jax.random.normal(key, (1, seq_len, count, model.head_dim), model.dtype)
        for key, count in zip(keys, heads, strict=True)
    ]


# ---- the report ----------------------------------------------------------------------------------


def row(
    name: str, how: str, both: Sequence[Found], plain: Sequence[Found], comparable: bool
) -> str:
    """A line of the table.

    Args:
        name: of the batch.
        how: it was dealt.
        both: predicted, measured.
        plain: the same in the order of the data.
        comparable: whether predictions are of the device that was measured.
    """
    forecast, real = both
    off = _off if comparable else lambda *_: "–"
    ratios = [before.step_ms / after.step_ms for before, after in zip(plain, both, strict=True)]
    return _line(
        name, how, f"{forecast.density:.4f}", f"{real.density:.4f}", f"{forecast.attention:.2f}",
        f"{real.attention:.2f}", f"{forecast.step:.3f}", f"{real.step:.3f}",
        f"{forecast.attention_ms:.0f}", f"{real.attention_ms:.0f}",
        off(forecast.attention_ms, real.attention_ms), f"{forecast.step_ms / 1e3:.3f}",
        f"{real.step_ms / 1e3:.3f}", off(forecast.step_ms, real.step_ms),
        *(f"{ratio:.2f} x" for ratio in ratios),
    )  # fmt: skip


def conclusions(
    found: Mapping[str, Sequence[tuple[Found, Found]]], costs: Sequence[float]
) -> list[str]:
    """What was reached of what was set.

    Args:
        found: predicted and measured steps, by the order.
        costs: time with counting over time without, less 1, of each batch.
    """
    ends = {how: np.mean([real.attention for _, real in pairs]) for how, pairs in found.items()}
    begin = ends.pop("none")
    every = [pair for pairs in found.values() for pair in pairs]
    errors = [real.step_ms / forecast.step_ms - 1 for forecast, real in every]
    worst = max(errors, key=abs)
    rest = [float(np.mean([each[which].rest_ms for each in every])) for which in (0, 1)]
    cost = statistics.mean(costs)
    reached = "; ".join(
        f"{value:.2f} with `{how}`, {_reached(value <= _IMBALANCE)}" for how, value in ends.items()
    )
    return [
        f"- Imbalance of attention as measured, {begin:.2f} in the order of the data (goal at most "
        f"{_IMBALANCE}): {reached}.",
        f"- Time of a step over its prediction, less 1 (goal within {_ERROR:.0%}): "
        f"{np.mean(errors):+.1%} in the mean and {worst:+.1%} at the worst of {len(errors)}, "
        f"{_reached(abs(worst) <= _ERROR)}. A step without its attention takes {rest[1]:.0f} ms, "
        f"and {rest[0]:.0f} were predicted ({_off(*rest)}).",
        f"- Own cost (goal at most {_COST:.1%} of a step): {cost:+.2%} in the mean of "
        f"{len(costs)} batches, {_reached(cost <= _COST)}.",
    ]


def _reached(yes: bool) -> str:
    return "reached" if yes else "missed"


def _off(forecast: float, real: float) -> str:
    return f"{real / forecast - 1:+.1%}"


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _header(cells: Sequence[str]) -> list[str]:
    return [_line(*cells), "|" + " --- |" * len(cells)]


def _comparable() -> bool:
    return "H200" in jax.devices()[0].device_kind


def _introduction(args: argparse.Namespace, run: Setting) -> list[str]:
    model, kind = run.config.model, jax.devices()[0].device_kind
    lines = [
        f"# Groups one after the other on {kind}",
        "",
        f"{setting()}. {run.config.run.name} with {model.num_layers} layers and a vocabulary of "
        f"{model.vocab_size}, {model.num_heads}/{model.num_kv_heads} heads of {model.head_dim}, "
        f"{model.dtype}, remat {model.remat}, random weights. {run.groups} groups of {run.parts} "
        f"packs of {run.config.data.seq_len} tokens, documents of {args.documents[0]} and "
        f"{args.documents[1]} tokens in the mean, seed {args.seed}; {args.batches} batches that "
        f"begin at an imbalance of attention of {args.start} +- 0.05, as predicted.",
        "",
        "**No two groups ran at once.** Each ran by itself on one device, as the training step of "
        "one group over its packs. A step takes what its slowest group takes; the sum of gradients "
        "over groups is not in it. Each step of a group was timed once, after others of its "
        "program; a group that is the same in two orders ran once. Attention was timed by itself, "
        f"one layer of each pack (median of {args.repeats}) with the drawing of its lists, times "
        "the layers. Pairs are drawn and not chosen: densities as in `benchmarks/balance.py`. "
        f"`{balance.TUNED}`: what shares do to densities is given too, alike in all layers; that "
        "their prediction meets it says nothing about a real model, the times do. Averages had "
        f"seen {balance.WARM} batches before, as drawn.",
        "",
        "Predicted: attention by the table in `mtraining_jax/latency.py` with the densities drawn, "
        "the rest by the dry run. *Off*: measured over predicted, less 1. *Faster*: than `none`.",
    ]
    if not _comparable():
        lines += [
            "",
            f"Predictions and goals are of an H200 and this is a {kind}: they are not compared.",
        ]
    return [*lines, "", *_header(_COLUMNS)]


def report(args: argparse.Namespace, run: Setting, config: Config) -> Iterator[str]:
    """Lines of the markdown, as they come.

    Args:
        args: of the command.
        run: of several groups.
        config: of that run.
    """
    batches = chosen_batches(run, args.seed, args.batches, args.start, args.documents)
    dealt = dealt_batches(*batches, run)
    mesh = parts.build_mesh(run.config)
    yield from _introduction(args, run)
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
            yield row(str(number + 1), how, found[how][-1], found["none"][-1], _comparable())
            if how == _COUNTED:
                plain = groups.measure(step, counting=False)
                costs.append([plain.step_ms.sum() / 1e3, real.step_ms.sum() / 1e3])
    means = {
        how: [Found.mean(side) for side in zip(*pairs, strict=True)]
        for how, pairs in found.items()
    }
    for how, both in means.items():
        yield row("mean", how, both, means["none"], _comparable())
    yield from ["", f"The groups of `{_COUNTED}`, their times added up:", ""]
    yield from _header(_COST_COLUMNS)
    for number, (without, counting) in enumerate(costs, 1):
        yield _line(str(number), f"{without:.3f}", f"{counting:.3f}", _off(without, counting))
    if _comparable():
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
