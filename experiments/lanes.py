"""Trains and measures several arms and seeds at a time, within the time that a machine is lent for.

    python -m experiments.lanes --tier c --minutes 25 --plan 0:dense,sampled_rows 0:window 1:dense

Runs are trained one after another in the order of the plan, and measured beside it as soon as they
are there, as either leaves the GPU waiting now and then. The first item of the plan is trained
alone, all its arms before any is measured, so that its steps have times worth keeping; those of all
others are left out, and with `--shared` its own too, as another tier runs beside it. Programs of
all arms are compiled first, `--jobs` at a time. The same command goes on where it stopped; status
75 says that it is to be given again.
"""

import argparse
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from experiments import arms, run
from experiments.lease import Lease
from experiments.measure import LATER, START
from mtraining_jax.errors import UserError


class Item(NamedTuple):
    """Some arms of one seed."""

    seed: int
    arms: tuple[str, ...]


def parse_item(tier: str, text: str) -> Item:
    """An item such as "0:dense,sampled_rows".

    Raises:
        UserError: if it is not written so, or the tier has no such arm.
    """
    seed, colon, names = text.partition(":")
    if not colon or not seed.isdecimal() or not names:
        raise UserError(f'--plan has items as "0:dense,sampled_rows" (SEED:ARMS), not "{text}"')
    found = tuple(names.split(","))
    for arm in found:
        arms.config_path(tier, arm)
    return Item(int(seed), found)


class Lanes:
    """One lane that trains, and one that measures what is trained.

    Args:
        lease: the time there is.
        args: of `experiments.run`, for all items.
        plan: what to do, in this order.
        overrides: fields of all configurations.
    """

    def __init__(
        self,
        lease: Lease,
        args: argparse.Namespace,
        plan: Sequence[Item],
        overrides: arms.Overrides,
    ) -> None:
        self._lease, self._args, self._plan, self._overrides = lease, args, plan, overrides
        self._trained = [{arm: threading.Event() for arm in item.arms} for item in plan]
        self._over = threading.Event()

    def run(self) -> bool:
        """Returns whether all is trained and measured.

        Raises:
            UserError: of the lane that failed first.
        """
        with ThreadPoolExecutor(1) as pool:
            measuring = pool.submit(self._until_one_fails, self._measure_all)
            try:
                trained = self._until_one_fails(self._train_all)
            finally:
                # What is not trained now never will be.
                for event in self._events(range(len(self._plan))):
                    event.set()
            return measuring.result() and trained

    def _events(self, places: Iterable[int]) -> list[threading.Event]:
        return [event for place in places for event in self._trained[place].values()]

    def _until_one_fails(self, lane: Callable[[], bool]) -> bool:
        try:
            return lane()
        except BaseException:
            self._over.set()
            raise

    def _for(self, item: Item, place: int) -> argparse.Namespace:
        # The dense arm is used with the patterns of all arms that this plan has of its seed so far.
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
                if not run.train(self._lease, self._for(item, place), arm, self._overrides):
                    return False
                self._trained[place][arm].set()
        return True

    def _measure_all(self) -> bool:
        for place, item in enumerate(self._plan):
            args = self._for(item, place)
            if not args.shared:
                # The steps of all its arms have times only if nothing is measured beside them.
                for event in self._events([place]):
                    event.wait()
            for arm in item.arms:
                self._trained[place][arm].wait()
                if self._over.is_set() or not run.is_trained(args, arm, self._overrides):
                    return False
                if not run.measure(self._lease, args, arm):
                    return False
            # The dense arm of an earlier item has other patterns to be used with now.
            again = "dense" in set(args.arms) - set(item.arms)
            if again and not run.measure(self._lease, args, "dense"):
                return False
        if self._plan[0].seed == 0 and self._starts():
            return run.measure(self._lease, self._for(self._plan[0], 0), START)
        return True

    def _starts(self) -> bool:
        config = arms.arm_config(self._args.tier, self._plan[0].arms[0], self._overrides)
        return config.model.init_from is not None


def main(argv: list[str] | None = None) -> int:
    """Runs; returns 0 when all is there, 75 if the same command is to be given again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", nargs="+", required=True, metavar="SEED:ARMS")
    args = run.parse(parser, argv, minutes=25, jobs=6)
    # Two processes want memory of the same device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    lease = Lease(args.minutes)
    try:
        plan = [parse_item(args.tier, text) for text in args.plan]
        overrides = arms.split_overrides(args.set)
        names = list(dict.fromkeys(arm for item in plan for arm in item.arms))
        first = argparse.Namespace(**{**vars(args), "seed": plan[0].seed})
        left = [arm for arm in names if not run.is_trained(first, arm, overrides)]
        together = args.jobs > 1 and len(left) > 1
        if together and not run.take_probes(lease, first, left, overrides, 1):
            return LATER
        if not Lanes(lease, args, plan, overrides).run():
            print("time is up: the same command goes on", flush=True)
            return LATER
    except UserError as error:
        parser.error(str(error))
    print(f"all of the plan is in {args.results}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
