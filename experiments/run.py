"""Trains and evaluates all arms of one tier and seed, one after another, within a time limit.

    python -m experiments.run --tier c --seed 0 --minutes 9

Exit status 75 means that the time was up: run the same command again to resume. Results go to
RESULTS/TIER-sSEED.jsonl, checkpoints stay in FOLDER. `--probe` trains 20 steps of each arm instead
and prints their densities, which set the budgets before the first seed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.options import make_parser
from experiments import variants
from experiments.data import FOLDER
from experiments.measure import LATER, START
from experiments.result_lines import STEP_FIELDS, append_lines, read_lines, training_lines
from mtraining_jax.training.checkpoint import newest_step
from mtraining_jax.training.checkpoint.run_folder import CHECKPOINTS_NAME
from mtraining_jax.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
# A run that receives SIGTERM finishes its step and writes a checkpoint.
GRACE_SECONDS = 40
PROBE_STEPS = 20


class TimeBudget:
    """A time limit in minutes from now, and the commands that run within it."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    def left(self) -> float:
        """Seconds left."""
        return self._end - time.monotonic()

    def start(self, command: list[str], folder: Path) -> int:
        """Runs a command to its end, or sends SIGTERM when only the grace period is left.

        The folder holds the compilation cache. Returns the exit status; 75 without enough time.
        """
        if self.left() < 2 * GRACE_SECONDS:
            return LATER
        environment = {
            "JAX_COMPILATION_CACHE_DIR": str((folder / "compiled").resolve()),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1",
        }
        print("$", " ".join(command), flush=True)
        process = subprocess.Popen(command, cwd=ROOT, env=environment | os.environ)
        try:
            return process.wait(self.left() - GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()
        try:
            return LATER if process.wait(GRACE_SECONDS) else 0
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return LATER


def train_command(
    tier: str, arm: str, seed: int, folder: Path, overrides: variants.Overrides, probe: bool = False
) -> list[str]:
    """The `train.py` command that trains an arm.

    A probe runs the same program for some steps only, in a separate folder and without a
    checkpoint.
    """
    name, more = variants.run_name(tier, arm, seed), []
    if probe:
        name += "_probe"
        steps = variants.arm_config(tier, arm, overrides).run.steps
        more = [
            f"--run.steps={PROBE_STEPS}", f"--optimizer.decay_steps={steps}",
            "--checkpoint.last_step=false", "--checkpoint.resume=false",
        ]  # fmt: skip
    path = variants.config_path(tier, arm).relative_to(ROOT)
    return [
        sys.executable, "train.py", "--config", str(path),
        *(f"--{field}={value}" for field, value in overrides.items()),
        f"--run.name={name}", f"--run.output_dir={folder}",
        f"--run.seed={seed}", f"--data.seed={seed}", *more,
    ]  # fmt: skip


def is_trained(args: argparse.Namespace, arm: str, overrides: variants.Overrides) -> bool:
    """Whether the last checkpoint of the arm is that of its last step."""
    run = args.folder / variants.run_name(args.tier, arm, args.seed)
    steps = variants.arm_config(args.tier, arm, overrides).run.steps
    return newest_step(run / CHECKPOINTS_NAME) == steps


def measure(budget: TimeBudget, args: argparse.Namespace, arm: str) -> bool:
    """Adds an arm's training records to the results and evaluates it; returns whether complete."""
    if arm != START:
        about = {"tier": args.tier, "seed": args.seed, "trained": arm}
        path = args.results / f"{args.tier}-s{args.seed}.jsonl"
        if not any(x["what"] == "train" and x["trained"] == arm for x in read_lines(path)):
            run = args.folder / variants.run_name(args.tier, arm, args.seed)
            append_lines(path, training_lines(run, about))
    command = [
        sys.executable, "-m", "experiments.measure", f"--tier={args.tier}", f"--arm={arm}",
        f"--seed={args.seed}", f"--folder={args.folder}", f"--results={args.results}",
        f"--seconds={max(0, budget.left() - 2 * GRACE_SECONDS):.0f}",
        f"--arms={','.join(args.arms)}",
    ]  # fmt: skip
    command += [f"--samples={args.samples}"] if args.samples else []
    command += [f"--data={args.data}"] if args.data else []
    command += ["--lengths", *map(str, args.lengths)] if args.lengths else []
    command += ["--set", *args.set] if args.set else []
    return _succeeds(budget, args, command, f"evaluating {arm}")


def _succeeds(budget: TimeBudget, args: argparse.Namespace, command: list[str], what: str) -> bool:
    """Runs a command; returns whether it succeeded, False if the time was up."""
    status = budget.start(command, args.folder)
    if status not in (0, LATER):
        raise UserError(f"{what} failed with exit status {status}")
    return status == 0


def probe(budget: TimeBudget, args: argparse.Namespace, overrides: variants.Overrides) -> bool:
    """Trains a few steps of each arm and prints their densities; returns whether complete."""
    for arm in args.arms:
        run = args.folder / (variants.run_name(args.tier, arm, args.seed) + "_probe")
        shutil.rmtree(run, ignore_errors=True)
        command = train_command(args.tier, arm, args.seed, args.folder, overrides, probe=True)
        if not _succeeds(budget, args, command, f"the probe of {arm}"):
            return False
        last = [x for x in training_lines(run, {}) if not x.get("dense_step")][-1]
        numbers = ", ".join(f"{name} {last[name]:.4g}" for name in STEP_FIELDS if name in last)
        print(f"probe of {arm}: {numbers}", flush=True)
    return True


def run(budget: TimeBudget, args: argparse.Namespace, overrides: variants.Overrides) -> bool:
    """Trains and evaluates the arms; returns whether complete."""
    for arm in args.arms:
        if not is_trained(args, arm, overrides):
            command = train_command(args.tier, arm, args.seed, args.folder, overrides)
            if not _succeeds(budget, args, command, f"training {arm}"):
                return False
        if not measure(budget, args, arm):
            return False
    # Last, as the decision rule does not need the untrained model. It has no seed.
    starts = variants.arm_config(args.tier, "dense", overrides).model.init_from is not None
    return not starts or args.seed != 0 or measure(budget, args, START)


def main(argv: list[str] | None = None) -> int:
    """Runs all arms; returns 0, or 75 if the same command has to resume."""
    parser = make_parser(__doc__)
    parser.add_argument("--tier", choices=variants.TIERS, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arms", help="comma-separated; default: all, dense first")
    parser.add_argument("--probe", action="store_true", help="print densities after 20 steps")
    parser.add_argument("--minutes", type=float, default=9, help="time limit (default 9)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of runs and data")
    parser.add_argument("--data", type=Path, help="evaluation data; default FOLDER/data/TIER")
    parser.add_argument("--results", type=Path, help="default FOLDER/results")
    parser.add_argument("--samples", type=int, help="samples of each task, length and pattern")
    parser.add_argument("--lengths", type=int, nargs="+", help="needle lengths in tokens")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="for all arms")
    args = parser.parse_args(argv)
    args.results = args.results or args.folder / "results"
    args.arms = args.arms.split(",") if args.arms else list(variants.TIERS[args.tier])
    budget = TimeBudget(args.minutes)
    try:
        overrides = variants.split_overrides(args.set)
        done = (probe if args.probe else run)(budget, args, overrides)
    except UserError as error:
        parser.error(str(error))
    if not done:
        print("time is up: run the same command again to resume", flush=True)
        return LATER
    print(f"tier {args.tier}, seed {args.seed} is complete; results: {args.results}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
