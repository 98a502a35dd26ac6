"""How long it takes to make the prompts of an evaluation.

python -m benchmarks.prompts --tokenizer path/to/tokenizer.json --length 131072

The first prompt of a task and length also finds the size of its haystack. No model is needed.
Compare the tokens a second with those that `benchmarks/evaluate.py` measures for reading a prompt.
"""

import argparse
import dataclasses
import datetime
import platform
import resource
import statistics
import time
from collections.abc import Sequence

from mtraining_jax.data.tokenizer import Tokenizer, make_tokenizer
from mtraining_jax.evaluation.tasks import Task, make_tasks

_COLUMNS = ("task", "tokens used", "first s", "next s", "tokens/s", "share of the tokenizer")


@dataclasses.dataclass
class Timed:
    """A tokenizer that notes how long it takes."""

    tokenizer: Tokenizer
    seconds: float = 0.0

    __hash__ = object.__hash__  # tasks remember sizes by tokenizer

    @property
    def name(self) -> str:
        """As of the tokenizer."""
        return self.tokenizer.name

    def encode(self, text: str):
        """As of the tokenizer."""
        begin = time.perf_counter()
        ids = self.tokenizer.encode(text)
        self.seconds += time.perf_counter() - begin
        return ids


def row(task: Task, length: int, repeats: int, tokenizer: Tokenizer) -> Sequence[str]:
    """The cells of one task: medians over `repeats` prompts after the first."""
    timed = Timed(tokenizer)
    times, shares, used = [], [], []
    for number in range(repeats + 1):
        timed.seconds = 0.0
        begin = time.perf_counter()
        sample = task.sample(length, number, 0, timed)
        times.append(time.perf_counter() - begin)
        shares.append(timed.seconds / times[-1])
        used.append(len(sample.prompt_ids) + sample.max_new_tokens)
    median = statistics.median(times[1:])
    return (
        task.name,
        f"{statistics.median(used[1:]):.0f}",
        f"{times[0]:.2f}",
        f"{median:.2f}",
        f"{length / median:,.0f}",
        f"{100 * statistics.median(shares[1:]):.0f} %",
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", required=True, help='a tokenizer.json, or "bytes"')
    parser.add_argument("--eos", help="its end token, if it is not one of the usual ones")
    parser.add_argument("--length", type=int, default=131072)
    parser.add_argument("--tasks", nargs="+", default=["ruler_generated", "needle", "passkey"])
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    tokenizer = make_tokenizer(arguments.tokenizer, arguments.eos)
    print(
        f"{datetime.date.today()}, {platform.machine()}, Python {platform.python_version()}; "
        f"prompts of {arguments.length} tokens, medians of {arguments.repeats}, one process\n"
    )
    print("| " + " | ".join(_COLUMNS) + " |\n|" + " --- |" * len(_COLUMNS))
    for task in make_tasks(arguments.tasks, {}):
        cells = row(task, arguments.length, arguments.repeats, tokenizer)
        print("| " + " | ".join(cells) + " |", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"\nPeak memory of the process: {peak / 2**30:.2f} GiB.")


if __name__ == "__main__":
    main()
