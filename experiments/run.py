"""All arms of one tier and seed: trains and measures one after another, within a time limit.

    python -m experiments.run --tier c --seed 0 --minutes 9

The same command goes on where it stopped (exit status 75 says that it is to be given again). Small
lines only are written into RESULTS/TIER-sSEED.jsonl; checkpoints stay in FOLDER. `--probe` trains
20 steps of each arm instead, and prints densities: budgets are set by them before the first seed.
With `--jobs 6` the programs of all arms are compiled first, six at a time: a machine that has many
cores, and programs of no earlier run, is done much sooner. With `--no-measure` it trains alone, so
that a second command can measure what is trained already; steps that run beside others have no
times worth keeping, and `--shared` leaves them out.
"""

import argparse
import shutil
import sys
from pathlib import Path

from experiments import arms
from experiments.data import FOLDER
from experiments.lease import GRACE_SECONDS, ROOT, Lease
from experiments.measure import LATER, START
from experiments.steps import KEPT, training_lines
from mtraining_jax.errors import UserError
from mtraining_jax.training.checkpoint import newest_step
from mtraining_jax.training.run_folder import CHECKPOINTS_NAME

PROBE_STEPS = 20
_LAST_IS_DENSE = (
    "--sparsity.dense_first=0", "--sparsity.dense_every=0", "--sparsity.dense_last=1",
)  # fmt: skip


def train_command(
    tier: str, arm: str, seed: int, folder: Path, overrides: arms.Overrides,
    probe_steps: int | None = None,
) -> list[str]:
    """The command that trains an arm: an ordinary train.py.

    With `probe_steps` it takes so many steps, in a folder of its own and without a checkpoint. The
    program is the same then, so that the run finds it compiled. Of an arm with dense steps the last
    one is dense, and there are two at least, so that both programs are.
    """
    name = arms.run_name(tier, arm, seed)
    steps = []
    if probe_steps is not None:
        name = _probe_name(tier, arm, seed)
        config = arms.arm_config(tier, arm, overrides)
        dense = []
        if config.dense_steps.count():
            dense, probe_steps = [*_LAST_IS_DENSE], max(2, probe_steps)
        steps = [
            f"--run.steps={probe_steps}", f"--optimizer.decay_steps={config.run.steps}",
            "--checkpoint.last_step=false", "--checkpoint.resume=false", *dense,
        ]  # fmt: skip
    path = arms.config_path(tier, arm).relative_to(ROOT)
    return [
        sys.executable, "train.py", "--config", str(path),
        *(f"--{field}={value}" for field, value in overrides),
        f"--run.name={name}", f"--run.output_dir={folder}", f"--run.seed={seed}",
        f"--data.seed={seed}", *steps,
    ]  # fmt: skip


def _probe_name(tier: str, arm: str, seed: int) -> str:
    return arms.run_name(tier, arm, seed) + "_probe"


def is_trained(args: argparse.Namespace, arm: str, overrides: arms.Overrides) -> bool:
    """Whether the arm has been trained to its last step."""
    run = args.folder / arms.run_name(args.tier, arm, args.seed)
    steps = arms.arm_config(args.tier, arm, overrides).run.steps
    return newest_step(run / CHECKPOINTS_NAME) == steps


def train(lease: Lease, args: argparse.Namespace, arm: str, overrides: arms.Overrides) -> bool:
    """Trains an arm to its end; returns whether it is there."""
    if not is_trained(args, arm, overrides):
        command = train_command(args.tier, arm, args.seed, args.folder, overrides)
        status = lease.start(command, args.folder)
        if status not in (0, LATER):
            raise UserError(f"training of {arm} ended with status {status}")
        if status == LATER:
            return False
    return True


def measure(lease: Lease, args: argparse.Namespace, arm: str) -> bool:
    """Keeps the lines of an arm's steps and measures it; returns whether all is measured."""
    if arm != START:
        about = {"tier": args.tier, "seed": args.seed, "trained": arm}
        path = args.results / f"{args.tier}-s{args.seed}.jsonl"
        there = [x for x in arms.read_lines(path) if x["what"] == "train" and x["trained"] == arm]
        if not there:
            run = args.folder / arms.run_name(args.tier, arm, args.seed)
            arms.append_lines(path, training_lines(run, about, not args.shared))
    command = [
        sys.executable, "-m", "experiments.measure", f"--tier={args.tier}", f"--arm={arm}",
        f"--seed={args.seed}", f"--folder={args.folder}", f"--results={args.results}",
        f"--seconds={max(0, lease.left() - 2 * GRACE_SECONDS):.0f}", f"--jobs={args.jobs}",
        f"--arms={','.join(args.arms)}",
    ]  # fmt: skip
    command += [f"--samples={args.samples}"] if args.samples else []
    command += [f"--data={args.data}"] if args.data else []
    command += ["--lengths", *map(str, args.lengths)] if args.lengths else []
    command += ["--set", *args.set] if args.set else []
    status = lease.start(command, args.folder)
    if status not in (0, LATER):
        raise UserError(f"measuring {arm} ended with status {status}")
    return status == 0


def take_probes(
    lease: Lease, args: argparse.Namespace, names: list[str], overrides: arms.Overrides, steps: int
) -> bool:
    """Some steps of each of these arms, `args.jobs` arms at a time; returns whether all ended well.

    Raises:
        UserError: if a probe failed though there was time.
    """
    commands = {}
    for arm in names:
        name = _probe_name(args.tier, arm, args.seed)
        shutil.rmtree(args.folder / name, ignore_errors=True)
        commands[name] = train_command(args.tier, arm, args.seed, args.folder, overrides, steps)
    failed = lease.start_together(commands, args.folder, args.jobs)
    if failed and lease.left() > 2 * GRACE_SECONDS:
        logs = ", ".join(str(args.folder / f"{name}.log") for name in failed)
        raise UserError(f"these probes failed, as the ends of their logs say: {logs}")
    return not failed


def probe(lease: Lease, args: argparse.Namespace, overrides: arms.Overrides) -> bool:
    """Some steps of each arm, and their densities."""
    if not take_probes(lease, args, args.arms, overrides, PROBE_STEPS):
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
    """Arguments of a parser, with those that all commands have which train and measure.

    Args:
        parser: with the arguments of the command itself; ends the program where one is wrong.
        argv: as of `argparse`.
        minutes: default of `--minutes`.
        jobs: default of `--jobs`.
    """
    parser.add_argument("--tier", choices=arms.TIERS, required=True)
    parser.add_argument(
        "--minutes", type=float, default=minutes, help=f"of this call (default {minutes})"
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of runs and data")
    parser.add_argument("--data", type=Path, help="of measurements; default FOLDER/data/TIER")
    parser.add_argument("--results", type=Path, help="default FOLDER/results")
    parser.add_argument(
        "--jobs", type=int, default=jobs, help=f"programs that compile at a time (default {jobs})"
    )
    parser.add_argument("--samples", type=int, help="of each task, length and pattern")
    parser.add_argument("--lengths", type=int, nargs="+", help="of needles")
    parser.add_argument("--shared", action="store_true", help="others use the device: no times")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="for all arms")
    args = parser.parse_args(argv)
    args.results = args.results or args.folder / "results"
    if args.jobs < 1:
        parser.error(f"--jobs must be 1 or more, not {args.jobs}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Runs; returns 0 when all is there, 75 if the same command is to be given again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arms", help="separated by commas; default all, dense first")
    parser.add_argument("--probe", action="store_true", help="densities of 20 steps of each arm")
    parser.add_argument("--no-measure", action="store_true", help="train, and measure nothing")
    args = parse(parser, argv, minutes=9, jobs=1)
    args.arms = args.arms.split(",") if args.arms else list(arms.TIERS[args.tier])
    lease = Lease(args.minutes)
    try:
        overrides = arms.split_overrides(args.set)
        if args.probe:
            return 0 if probe(lease, args, overrides) else LATER
        left = [arm for arm in args.arms if not is_trained(args, arm, overrides)]
        if args.jobs > 1 and len(left) > 1 and not take_probes(lease, args, left, overrides, 1):
            return LATER
        starts = arms.arm_config(args.tier, "dense", overrides).model.init_from is not None
        for arm in args.arms:
            done = train(lease, args, arm, overrides)
            if not (done and (args.no_measure or measure(lease, args, arm))):
                print("time is up: the same command goes on", flush=True)
                return LATER
        # Last: it tells what training did, decides nothing, and is of no seed.
        if starts and args.seed == 0 and not (args.no_measure or measure(lease, args, START)):
            return LATER
    except UserError as error:
        parser.error(str(error))
    if args.no_measure:
        print(f"tier {args.tier}, seed {args.seed}: all asked for is trained", flush=True)
        return 0
    print(f"all of tier {args.tier}, seed {args.seed}, is in {args.results}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
