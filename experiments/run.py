"""Trains and evaluates all arms of one tier and seed, one after another, within a time limit.

    python -m experiments.run --tier c --seed 0 --minutes 9

Exit status 75 means that the time was up: run the same command again to resume. Results go to
RESULTS/TIER-sSEED.jsonl, checkpoints stay in FOLDER. `--probe` trains 20 steps of each arm instead
and prints their densities, which set the budgets before the first seed. `--jobs 6` compiles the
programs of all arms first, six at a time. With `--no-measure` it only trains; another command can
then evaluate at the same time. `--shared` omits step times, which are not meaningful on a shared
device.
"""

import argparse
import shutil
import sys
from pathlib import Path

from experiments import variants
from experiments.data import FOLDER
from experiments.measure import LATER, START
from experiments.result_lines import append_lines, read_lines
from experiments.steps import KEPT, training_lines
from experiments.time_budget import GRACE_SECONDS, ROOT, TimeBudget
from mtraining_jax.training.checkpoint import newest_step
from mtraining_jax.training.checkpoint.run_folder import CHECKPOINTS_NAME
from mtraining_jax.utils.errors import UserError

PROBE_STEPS = 20
_LAST_IS_DENSE = (
    "--sparsity.dense_warmup_steps=0", "--sparsity.dense_interval=0", "--sparsity.dense_cooldown_steps=1",
)  # fmt: skip


def train_command(
    tier: str,
    arm: str,
    seed: int,
    folder: Path,
    overrides: variants.Overrides,
    probe_steps: int | None = None,
) -> list[str]:
    """The `train.py` command that trains an arm.

    With `probe_steps` it runs only this number of steps, in a separate folder and without a
    checkpoint. The program is the same, so this fills the compilation cache. An arm with dense
    steps runs at least two steps, the last one dense, to compile both of its programs.
    """
    name = variants.run_name(tier, arm, seed)
    steps = []
    if probe_steps is not None:
        name = _probe_name(tier, arm, seed)
        config = variants.arm_config(tier, arm, overrides)
        dense = []
        if config.dense_steps.count():
            dense, probe_steps = [*_LAST_IS_DENSE], max(2, probe_steps)
        steps = [
            f"--run.steps={probe_steps}",
            f"--optimizer.decay_steps={config.run.steps}",
            "--checkpoint.last_step=false",
            "--checkpoint.resume=false",
            *dense,
        ]
    path = variants.config_path(tier, arm).relative_to(ROOT)
    return [
        sys.executable,
        "train.py",
        "--config",
        str(path),
        *(f"--{field}={value}" for field, value in overrides),
        f"--run.name={name}",
        f"--run.output_dir={folder}",
        f"--run.seed={seed}",
        f"--data.seed={seed}",
        *steps,
    ]


def _probe_name(tier: str, arm: str, seed: int) -> str:
    return variants.run_name(tier, arm, seed) + "_probe"


def is_trained(args: argparse.Namespace, arm: str, overrides: variants.Overrides) -> bool:
    """Whether the last checkpoint of the arm is that of its last step."""
    run = args.folder / variants.run_name(args.tier, arm, args.seed)
    steps = variants.arm_config(args.tier, arm, overrides).run.steps
    return newest_step(run / CHECKPOINTS_NAME) == steps


def train(
    budget: TimeBudget, args: argparse.Namespace, arm: str, overrides: variants.Overrides
) -> bool:
    """Trains an arm; returns whether training is complete."""
    if not is_trained(args, arm, overrides):
        command = train_command(args.tier, arm, args.seed, args.folder, overrides)
        status = budget.start(command, args.folder)
        if status not in (0, LATER):
            raise UserError(f"training {arm} failed with exit status {status}")
        if status == LATER:
            return False
    return True


def measure(budget: TimeBudget, args: argparse.Namespace, arm: str) -> bool:
    """Adds an arm's training records to the results and evaluates it; returns whether complete."""
    if arm != START:
        about = {"tier": args.tier, "seed": args.seed, "trained": arm}
        path = args.results / f"{args.tier}-s{args.seed}.jsonl"
        if not any(x["what"] == "train" and x["trained"] == arm for x in read_lines(path)):
            run = args.folder / variants.run_name(args.tier, arm, args.seed)
            append_lines(path, training_lines(run, about, not args.shared))
    command = [
        sys.executable,
        "-m",
        "experiments.measure",
        f"--tier={args.tier}",
        f"--arm={arm}",
        f"--seed={args.seed}",
        f"--folder={args.folder}",
        f"--results={args.results}",
        f"--seconds={max(0, budget.left() - 2 * GRACE_SECONDS):.0f}",
        f"--jobs={args.jobs}",
        f"--arms={','.join(args.arms)}",
    ]
    command += [f"--samples={args.samples}"] if args.samples else []
    command += [f"--data={args.data}"] if args.data else []
    command += ["--lengths", *map(str, args.lengths)] if args.lengths else []
    command += ["--set", *args.set] if args.set else []
    status = budget.start(command, args.folder)
    if status not in (0, LATER):
        raise UserError(f"evaluating {arm} failed with exit status {status}")
    return status == 0


def take_probes(
    budget: TimeBudget, args: argparse.Namespace, names: list[str],
    overrides: variants.Overrides, steps: int,
) -> bool:  # fmt: skip
    """Trains a few steps of each arm, `args.jobs` at a time; returns whether all succeeded.

    Raises:
        UserError: if a probe failed for another reason than the time limit.
    """
    commands = {}
    for arm in names:
        name = _probe_name(args.tier, arm, args.seed)
        shutil.rmtree(args.folder / name, ignore_errors=True)
        commands[name] = train_command(args.tier, arm, args.seed, args.folder, overrides, steps)
    failed = budget.start_together(commands, args.folder, args.jobs)
    if failed and budget.left() > 2 * GRACE_SECONDS:
        logs = ", ".join(str(args.folder / f"{name}.log") for name in failed)
        raise UserError(f"probes failed; see the end of their logs: {logs}")
    return not failed


def probe(budget: TimeBudget, args: argparse.Namespace, overrides: variants.Overrides) -> bool:
    """Trains a few steps of each arm and prints their densities."""
    if not take_probes(budget, args, args.arms, overrides, PROBE_STEPS):
        return False
    for arm in args.arms:
        run = args.folder / _probe_name(args.tier, arm, args.seed)
        last = [x for x in training_lines(run, {}) if not x.get("dense_step")][-1]
        numbers = ", ".join(f"{name} {last[name]:.4g}" for name in KEPT if name in last)
        print(f"probe of {arm}: {numbers}", flush=True)
    return True


def parse(
    parser: argparse.ArgumentParser, argv: list[str] | None, *, minutes: float, jobs: int
) -> argparse.Namespace:
    """Adds the options that all training commands share, and parses the command line.

    Args:
        parser: parser with the command's own options.
        argv: arguments; None for those of the process.
        minutes: default of `--minutes`.
        jobs: default of `--jobs`.
    """
    parser.add_argument("--tier", choices=variants.TIERS, required=True)
    parser.add_argument(
        "--minutes", type=float, default=minutes, help=f"time limit (default {minutes})"
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of runs and data")
    parser.add_argument("--data", type=Path, help="evaluation data; default FOLDER/data/TIER")
    parser.add_argument("--results", type=Path, help="default FOLDER/results")
    parser.add_argument(
        "--jobs", type=int, default=jobs, help=f"parallel compilations (default {jobs})"
    )
    parser.add_argument("--samples", type=int, help="samples of each task, length and pattern")
    parser.add_argument("--lengths", type=int, nargs="+", help="needle lengths in tokens")
    parser.add_argument("--shared", action="store_true", help="the device is shared: omit times")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="for all arms")
    args = parser.parse_args(argv)
    args.results = args.results or args.folder / "results"
    if args.jobs < 1:
        parser.error(f"--jobs must be 1 or more, not {args.jobs}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Runs all arms; returns 0, or 75 if the same command has to resume."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arms", help="comma-separated; default: all, dense first")
    parser.add_argument("--probe", action="store_true", help="print densities after 20 steps")
    parser.add_argument("--no-measure", action="store_true", help="train only")
    args = parse(parser, argv, minutes=9, jobs=1)
    args.arms = args.arms.split(",") if args.arms else list(variants.TIERS[args.tier])
    budget = TimeBudget(args.minutes)
    try:
        overrides = variants.split_overrides(args.set)
        if args.probe:
            return 0 if probe(budget, args, overrides) else LATER
        left = [arm for arm in args.arms if not is_trained(args, arm, overrides)]
        if args.jobs > 1 and len(left) > 1 and not take_probes(budget, args, left, overrides, 1):
            return LATER
        starts = variants.arm_config(args.tier, "dense", overrides).model.init_from is not None
        for arm in args.arms:
            done = train(budget, args, arm, overrides)
            if not (done and (args.no_measure or measure(budget, args, arm))):
                print("time is up: run the same command again to resume", flush=True)
                return LATER
        # Last, as the decision rule does not need the untrained model. It has no seed.
        if starts and args.seed == 0 and not (args.no_measure or measure(budget, args, START)):
            return LATER
    except UserError as error:
        parser.error(str(error))
    if args.no_measure:
        print(f"tier {args.tier}, seed {args.seed}: all requested arms are trained", flush=True)
        return 0
    print(f"tier {args.tier}, seed {args.seed}: results are complete: {args.results}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
