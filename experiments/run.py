"""All arms of one tier and seed: trains and measures one after another, within a time limit.

    python -m experiments.run --tier c --seed 0 --minutes 9

The same command goes on where it stopped (exit status 75 says that it is to be given again). Small
lines only are written into RESULTS/TIER-sSEED.jsonl; checkpoints stay in FOLDER. `--probe` trains
20 steps of each arm instead, and prints densities: budgets are set by them before the first seed.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from experiments import arms
from experiments.arms import Line
from experiments.data import FOLDER
from experiments.measure import LATER, START
from mtraining_jax.errors import UserError
from mtraining_jax.training.checkpoint import newest_step
from mtraining_jax.training.run_folder import CHECKPOINTS_NAME

ROOT = Path(__file__).resolve().parents[1]
# A stopped run finishes its step and writes a checkpoint.
GRACE_SECONDS = 40
PROBE_STEPS = 20
# Of a step's record, what the report reads.
KEPT = (
    "step", "loss", "grad_norm", "step_seconds", "density", "recall", "recall_worst",
    "tokens_per_second",
)  # fmt: skip


class Lease:
    """The time that is left, and the programs that are started in it.

    Args:
        minutes: from now.
    """

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    def left(self) -> float:
        """Seconds until nothing may run any more."""
        return self._end - time.monotonic()

    def start(self, command: list[str], folder: Path) -> int:
        """Runs a command until it ends, or asks it to stop when only the grace is left.

        Returns:
            Its exit status; 75 if there was no time to start it.
        """
        if self.left() < 2 * GRACE_SECONDS:
            return LATER
        environment = dict(os.environ)
        environment.setdefault("JAX_COMPILATION_CACHE_DIR", str((folder / "compiled").resolve()))
        environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1")
        print("$", " ".join(command), flush=True)
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        try:
            return process.wait(self.left() - GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()
        try:
            status = process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return LATER
        return LATER if status else 0


def train_command(
    tier: str, arm: str, seed: int, folder: Path, overrides: arms.Overrides, probe: bool
) -> list[str]:
    """The command that trains an arm: an ordinary train.py."""
    name = arms.run_name(tier, arm, seed)
    steps = []
    if probe:
        name += "_probe"
        full = arms.arm_config(tier, arm, overrides).run.steps
        steps = [
            f"--run.steps={PROBE_STEPS}", f"--optimizer.decay_steps={full}",
            "--checkpoint.last_step=false", "--checkpoint.resume=false",
        ]  # fmt: skip
    path = arms.config_path(tier, arm).relative_to(ROOT)
    return [
        sys.executable, "train.py", "--config", str(path),
        *(f"--{field}={value}" for field, value in overrides),
        f"--run.name={name}", f"--run.output_dir={folder}", f"--run.seed={seed}",
        f"--data.seed={seed}", *steps,
    ]  # fmt: skip


def training_lines(folder: Path, about: Line) -> list[Line]:
    """Steps of a run, as the report needs them; of a step that ran twice the last time."""
    steps = {x["step"]: x for x in arms.read_lines(folder / "metrics.jsonl") if "loss" in x}
    return [
        {"what": "train", **about, **{name: x[name] for name in KEPT if name in x}}
        for _, x in sorted(steps.items())
    ]


def train(lease: Lease, args: argparse.Namespace, arm: str, overrides: arms.Overrides) -> bool:
    """Trains an arm to its end; returns whether it is there."""
    run = args.folder / arms.run_name(args.tier, arm, args.seed)
    steps = arms.arm_config(args.tier, arm, overrides).run.steps
    if newest_step(run / CHECKPOINTS_NAME) != steps:
        command = train_command(args.tier, arm, args.seed, args.folder, overrides, False)
        status = lease.start(command, args.folder)
        if status not in (0, LATER):
            raise UserError(f"training of {arm} ended with status {status}")
        if status == LATER:
            return False
    about = {"tier": args.tier, "seed": args.seed, "trained": arm}
    path = args.results / f"{args.tier}-s{args.seed}.jsonl"
    there = [x for x in arms.read_lines(path) if x["what"] == "train" and x["trained"] == arm]
    if not there:
        arms.append_lines(path, training_lines(run, about))
    return True


def measure(lease: Lease, args: argparse.Namespace, arm: str) -> bool:
    """Measures a trained arm; returns whether all is measured."""
    command = [
        sys.executable, "-m", "experiments.measure", f"--tier={args.tier}", f"--arm={arm}",
        f"--seed={args.seed}", f"--folder={args.folder}", f"--results={args.results}",
        f"--seconds={max(0, lease.left() - 2 * GRACE_SECONDS):.0f}",
    ]  # fmt: skip
    command += [f"--samples={args.samples}"] if args.samples else []
    command += [f"--data={args.data}"] if args.data else []
    command += ["--lengths", *map(str, args.lengths)] if args.lengths else []
    command += ["--set", *args.set] if args.set else []
    status = lease.start(command, args.folder)
    if status not in (0, LATER):
        raise UserError(f"measuring {arm} ended with status {status}")
    return status == 0


def probe(lease: Lease, args: argparse.Namespace, overrides: arms.Overrides) -> bool:
    """Some steps of each arm, and their densities."""
    for arm in args.arms:
        command = train_command(args.tier, arm, args.seed, args.folder, overrides, True)
        if lease.start(command, args.folder):
            return False
        run = args.folder / f"{arms.run_name(args.tier, arm, args.seed)}_probe"
        last = training_lines(run, {})[-1]
        numbers = ", ".join(f"{name} {last[name]:.4g}" for name in KEPT if name in last)
        print(f"probe of {arm}: {numbers}", flush=True)
    return True


def main(argv: list[str] | None = None) -> int:
    """Runs; returns 0 when all is there, 75 if the same command is to be given again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tier", choices=arms.TIERS, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call (default 9)")
    parser.add_argument("--arms", help="separated by commas; default all, dense first")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of runs and data")
    parser.add_argument("--data", type=Path, help="of measurements; default FOLDER/data/TIER")
    parser.add_argument("--results", type=Path, help="default FOLDER/results")
    parser.add_argument("--probe", action="store_true", help="densities of 20 steps of each arm")
    parser.add_argument("--samples", type=int, help="of each task, length and pattern")
    parser.add_argument("--lengths", type=int, nargs="+", help="of needles")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="for all arms")
    args = parser.parse_args(argv)
    args.results = args.results or args.folder / "results"
    args.arms = args.arms.split(",") if args.arms else list(arms.TIERS[args.tier])
    lease = Lease(args.minutes)
    try:
        overrides = arms.split_overrides(args.set)
        if args.probe:
            return 0 if probe(lease, args, overrides) else LATER
        starts = arms.arm_config(args.tier, "dense", overrides).model.init_from is not None
        for arm in args.arms:
            if not (train(lease, args, arm, overrides) and measure(lease, args, arm)):
                print("time is up: the same command goes on", flush=True)
                return LATER
        # Last: it tells what training did, and decides nothing.
        if starts and not measure(lease, args, START):
            return LATER
    except UserError as error:
        parser.error(str(error))
    print(f"all of tier {args.tier}, seed {args.seed}, is in {args.results}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
