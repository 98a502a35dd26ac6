"""Evaluates one trained model with several patterns: validation loss by position, tasks, needles.

    python -m experiments.measure --tier c --arm sampled_rows --seed 0

`experiments.run` calls it after each arm. It appends to RESULTS/TIER-sSEED.jsonl and skips what has
been measured. The arm "start" is the checkpoint that tiers A and C start from.
"""

import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.options import make_parser
from benchmarks.quality.far_copies import far_copies
from experiments import synthetic, variants
from experiments.compare import FIRST_BUCKET
from experiments.data import FOLDER, VOCABULARY_A
from experiments.provenance import check_same_settings, header
from experiments.result_lines import Line, append_lines, read_lines
from mtraining_jax.config import Config
from mtraining_jax.data.tokenizer import Tokenizer
from mtraining_jax.models.label_scores import means_by_bucket
from mtraining_jax.tools.evaluate.engine.engine import Engine
from mtraining_jax.tools.evaluate.tasks import Sample, Task, make_tasks
from mtraining_jax.utils.errors import UserError

START = "start"
LAST_TOKENS = 64
# Differs from the seed of the training data, which is 1.
TEST_SEED = 2**20
SAMPLES = {"a": 64, "needle": 20}
# Exit status when the time is up and the same command would resume.
LATER = 75

Make = Callable[[Engine], Line]


class Measurement:
    """Evaluates one trained model and appends each result to a file.

    Args:
        tier, arm, seed: the model.
        results: the JSONL file.
        data: folder of the tier's data.
        deadline: in the time of `time.monotonic`; None for no limit.
        samples: number for each task, pattern and length; None for the default.
        lengths: needle lengths; None for S/4 and S.
    """

    def __init__(
        self,
        tier: str,
        arm: str,
        seed: int,
        *,
        results: Path,
        data: Path,
        deadline: float | None = None,
        samples: int | None = None,
        lengths: Sequence[int] | None = None,
    ) -> None:
        self.about = {"tier": tier, "seed": seed, "trained": arm}
        self._tier, self._results, self._data, self._deadline = tier, results, data, deadline
        self._samples, self._lengths = samples, lengths
        self._there = {self._key(line) for line in read_lines(results)}

    @staticmethod
    def _key(line: Line) -> tuple:
        names = ("what", "tier", "seed", "trained", "inferred", "task", "length", "number")
        return tuple(line.get(name) for name in names)

    def run(self, engine: Engine, configs: dict[str, Config]) -> bool:
        """Evaluates the model with each pattern, of configurations by name; False: time was up."""
        for inferred, config in configs.items():
            used = engine.with_pattern(config.sparsity.pattern)
            begin, count = time.monotonic(), 0
            for wanted, make in self._wanted(inferred, config.data.seq_len):
                line = {**self.about, "inferred": inferred, **wanted}
                if self._key(line) in self._there:
                    continue
                if self._deadline is not None and time.monotonic() > self._deadline:
                    return False
                append_lines(self._results, [{**line, **make(used)}])
                count += 1
            if count:
                seconds = time.monotonic() - begin
                print(
                    f"{self.about['trained']} evaluated with {inferred}: {count} measurements in "
                    f"{seconds:.0f} s",
                    flush=True,
                )
        return True

    def _wanted(self, inferred: str, seq_len: int) -> Iterator[tuple[Line, Make]]:
        """All measurements: key fields of a line, and a function that measures the others."""
        if self._tier == "a":
            numbers = range(self._samples or SAMPLES["a"])
            for task, number in itertools.product(synthetic.TASKS, numbers):
                problem = functools.partial(
                    synthetic.problem, task, seq_len, VOCABULARY_A, TEST_SEED + number
                )
                wanted = {"what": "task", "task": task, "length": seq_len, "number": number}
                yield wanted, functools.partial(recalled, problem)
            return
        held = np.load(self._data / "heldout.npy", mmap_mode="r")
        sources = json.loads((self._data / "sources.json").read_text())
        digest = sources["heldout.npy"]["sha256 of ids"][:16]
        shared = {"what": "loss", "length": held.shape[1], "held_out": digest}
        for number, (row, kind) in enumerate(zip(held, sources["kinds"], strict=True)):
            yield {**shared, "number": number, "kind": kind}, functools.partial(losses, row)
        if self.about["trained"] == "dense" and inferred not in variants.NEEDLES_OF_DENSE:
            return
        essays = {"essays": str(self._data / "prose.txt")}
        for name, options in (("needle", essays), ("passkey", {})):
            (task,) = make_tasks([name], options)
            for length in self._lengths or (seq_len // 4, seq_len):
                for number in range(self._samples or SAMPLES["needle"]):
                    wanted = {"what": "task", "task": name, "length": length, "number": number}
                    yield wanted, functools.partial(asked, task, length, number)


def losses(row: np.ndarray, engine: Engine) -> Line:
    """Losses in nats of one sequence [S]: by position, of the last 64 tokens and of far copies.

    One forward pass with the engine's pattern, as in training.
    """
    tokens = np.asarray(row, np.int32)
    scores, density = engine.programs.score(tokens[:-1], tokens[1:])
    found = np.asarray(scores.loss, np.float64)
    if not np.all(np.isfinite(found)):
        raise UserError("a validation loss is not finite")
    means, counts = means_by_bucket(found)
    first, copies = min(FIRST_BUCKET, len(counts) - 1), far_copies(tokens)[1:]
    return {
        "loss_by_position": means[first:],
        "tokens_by_position": counts[first:],
        "loss_of_last": float(found[-LAST_TOKENS:].mean()),
        "loss_of_copies": float(found[copies].mean()) if copies.any() else None,
        "density": density,
    }


def recalled(problem: Callable[[], synthetic.Problem], engine: Engine) -> Line:
    """Accuracy on the answer tokens of a synthetic problem.

    One forward pass with the engine's pattern, as in training.
    """
    tokens, is_answer = problem()
    scores, density = engine.programs.score(tokens[:-1], tokens[1:])
    return {
        "score": float(np.mean(np.asarray(scores.is_argmax)[is_answer[1:]])),
        "loss": float(np.mean(np.asarray(scores.loss, np.float64)[is_answer[1:]])),
        "density": density,
    }


def asked(task: Task, length: int, number: int, engine: Engine) -> Line:
    """Scores a needle: the engine's pattern reads the prompt, then each answer token is scored."""
    sample = _sample(task, length, number, engine.tokenizer)
    found = engine.forced(sample.prompt_ids, sample.answer_ids)
    return {
        "depth": sample.depth,
        "score": float(task.score_forced(sample, np.asarray(found.is_argmax, bool))),
        "density": found.density,
    }


@functools.lru_cache(maxsize=1024)
def _sample(task: Task, length: int, number: int, tokenizer: Tokenizer) -> Sample:
    # Cached: all patterns use the same sample.
    return task.sample(length, number, TEST_SEED, tokenizer)


def load(tier: str, arm: str, seed: int, folder: Path, overrides: variants.Overrides) -> Engine:
    """The trained model of an arm, or of `START`; raises what `Engine.load` raises."""
    config = variants.arm_config(tier, "dense", overrides)
    model = config.model
    if arm != START:
        # A run on token files does not record its tokenizer.
        tokenizer = None if tier == "a" else config.data.tokenizer
        return Engine.load(folder / variants.run_name(tier, arm, seed), tokenizer=tokenizer)
    if model.init_from is None:
        raise UserError(f"tier {tier} starts from random parameters, so it has no arm {START}")
    changed = {}
    scaling = model.rope_scaling
    if scaling is not None:
        names = "type", "factor", "original_max_position_embeddings"
        changed = {
            "model.override": ["max_position_embeddings", "rope_scaling"],
            "model.max_position_embeddings": model.max_position_embeddings,
            **{f"model.rope_scaling.{name}": getattr(scaling, name) for name in names},
        }
    return Engine.load(model.init_from, dtype=model.dtype, overrides=changed)


def main(argv: list[str] | None = None) -> int:
    """Evaluates the model; returns the exit status, 0 or 75 if the time was up."""
    parser = make_parser(__doc__)
    parser.add_argument("--tier", choices=variants.TIERS, required=True)
    parser.add_argument("--arm", choices=(*variants.TIERS["c"], START), required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of the runs")
    parser.add_argument("--data", type=Path, help="data of the tier; default FOLDER/data/TIER")
    parser.add_argument("--results", type=Path, help="folder; default FOLDER/results")
    parser.add_argument("--seconds", type=float, help="time limit")
    parser.add_argument("--arms", help="patterns for the dense arm (default: of all arms)")
    parser.add_argument("--samples", type=int, help="samples of each task, length and pattern")
    parser.add_argument("--lengths", type=int, nargs="+", help="needle lengths in tokens")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE")
    args = parser.parse_args(argv)
    results = (args.results or args.folder / "results") / f"{args.tier}-s{args.seed}.jsonl"
    try:
        measurement = Measurement(
            args.tier,
            args.arm,
            args.seed,
            results=results,
            data=args.data or args.folder / "data" / args.tier,
            deadline=None if args.seconds is None else time.monotonic() + args.seconds,
            samples=args.samples,
            lengths=args.lengths,
        )
        overrides = variants.split_overrides(args.set)
        names = (
            ["dense"]
            if args.arm == START
            else variants.inferred_with(args.tier, args.arm, args.arms and args.arms.split(","))
        )
        configs = {name: variants.arm_config(args.tier, name, overrides) for name in names}
        engine = load(args.tier, args.arm, args.seed, args.folder, overrides)
        trained = "dense" if args.arm == START else args.arm
        own = variants.arm_config(args.tier, trained, overrides)
        found = header(engine, own, measurement.about)
        check_same_settings(results, found)
        append_lines(results, [found])
        return 0 if measurement.run(engine, configs) else LATER
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
