"""Trains and evaluates several arms and seeds in parallel, within a time limit.

    python -m experiments.parallel_runs --tier c --plan 0:dense,sampled_rows 0:window 1:dense

Runs are trained one after another, in the order of the plan. At the same time, complete runs are
evaluated, because either task alone leaves the GPU idle at times. Evaluation starts after all arms
of the first item are trained, so that their step times are valid. Times of all other items are
omitted; `--shared` also omits those of the first, for a GPU with other work. Programs of all arms
are compiled first, `--jobs` at a time. Exit status 75 means that the time was up: run the same
command again to resume.
"""

import argparse
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from experiments import run, variants
from experiments.measure import LATER, START
from experiments.time_budget import TimeBudget
from mtraining_jax.utils.errors import UserError


class Item(NamedTuple):
    """An item of the plan: arms of one seed."""

    seed: int
    arms: tuple[str, ...]


def parse_item(tier: str, text: str) -> Item:
    """Parses an item such as "0:dense,sampled_rows".

    Raises:
        UserError: if the text has another form, or the tier has no such arm.
    """
    seed, colon, names = text.partition(":")
    if not colon or not seed.isdecimal() or not names:
        raise UserError(f'--plan needs SEED:ARMS, such as "0:dense,sampled_rows", not "{text}"')
    found = tuple(names.split(","))
    for arm in found:
        variants.config_path(tier, arm)
    return Item(int(seed), found)


class ParallelRuns:
    """One thread that trains, and one that evaluates complete runs.

    Args:
        budget: the time limit.
        args: options of `experiments.run`, for all items.
        plan: the items, in order.
        overrides: overrides for all configurations.
    """

    def __init__(
        self,
        budget: TimeBudget,
        args: argparse.Namespace,
        plan: Sequence[Item],
        overrides: variants.Overrides,
    ) -> None:
        self._budget, self._args, self._plan, self._overrides = budget, args, plan, overrides
        self._trained = [{arm: threading.Event() for arm in item.arms} for item in plan]
        self._over = threading.Event()

    def run(self) -> bool:
        """Returns whether all runs are trained and evaluated.

        Raises:
            UserError: from the thread that failed.
        """
        with ThreadPoolExecutor(1) as pool:
            measuring = pool.submit(self._until_one_fails, self._measure_all)
            try:
                trained = self._until_one_fails(self._train_all)
            finally:
                # Wake the evaluation: nothing more will be trained.
                for event in self._events(range(len(self._plan))):
                    event.set()
            return measuring.result() and trained

    def _events(self, places: Iterable[int]) -> list[threading.Event]:
        return [event for place in places for event in self._trained[place].values()]

    def _until_one_fails(self, work: Callable[[], bool]) -> bool:
        try:
            return work()
        except BaseException:
            self._over.set()
            raise

    def _for(self, item: Item, place: int) -> argparse.Namespace:
        # The dense arm is evaluated with the patterns of all arms of its seed up to this item.
        known = dict.fromkeys(
            arm for x in self._plan[: place + 1] if x.seed == item.seed for arm in x.arms
        )
        about = {"seed": item.seed, "arms": list(known), "shared": self._args.shared or place > 0}
        return argparse.Namespace(**{**vars(self._args), **about})

    def _train_all(self) -> bool:
        for place, item in enumerate(self._plan):
            for arm in item.arms:
                if self._over.is_set():
                    return False
                if not run.train(self._budget, self._for(item, place), arm, self._overrides):
                    return False
                self._trained[place][arm].set()
        return True

    def _measure_all(self) -> bool:
        for place, item in enumerate(self._plan):
            args = self._for(item, place)
            if not args.shared:
                # Step times are valid only if nothing is evaluated at the same time.
                for event in self._events([place]):
                    event.wait()
            for arm in item.arms:
                self._trained[place][arm].wait()
                if self._over.is_set() or not run.is_trained(args, arm, self._overrides):
                    return False
                if not run.measure(self._budget, args, arm):
                    return False
            # This item adds patterns for the dense arm of an earlier item.
            again = "dense" in set(args.arms) - set(item.arms)
            if again and not run.measure(self._budget, args, "dense"):
                return False
        if self._plan[0].seed == 0 and self._starts():
            return run.measure(self._budget, self._for(self._plan[0], 0), START)
        return True

    def _starts(self) -> bool:
        config = variants.arm_config(self._args.tier, self._plan[0].arms[0], self._overrides)
        return config.model.init_from is not None


def main(argv: list[str] | None = None) -> int:
    """Runs the plan; returns 0, or 75 if the same command has to resume."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", nargs="+", required=True, metavar="SEED:ARMS")
    args = run.parse(parser, argv, minutes=25, jobs=6)
    # Two processes share the device memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    budget = TimeBudget(args.minutes)
    try:
        plan = [parse_item(args.tier, text) for text in args.plan]
        overrides = variants.split_overrides(args.set)
        names = list(dict.fromkeys(arm for item in plan for arm in item.arms))
        first = argparse.Namespace(**{**vars(args), "seed": plan[0].seed})
        left = [arm for arm in names if not run.is_trained(first, arm, overrides)]
        together = args.jobs > 1 and len(left) > 1
        if together and not run.take_probes(budget, first, left, overrides, 1):
            return LATER
        if not ParallelRuns(budget, args, plan, overrides).run():
            print("time is up: run the same command again to resume", flush=True)
            return LATER
    except UserError as error:
        parser.error(str(error))
    print(f"the plan is complete; results: {args.results}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
