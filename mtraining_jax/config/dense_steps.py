"""Dense steps of a sparse run: steps that compute all pairs."""

import dataclasses

from mtraining_jax.utils.text import counted


@dataclasses.dataclass(frozen=True)
class DenseSteps:
    """The dense steps of a run: `step in dense_steps`, with steps counted from 1.

    Attributes:
        every: multiples of this are dense too; 0 disables.
    """

    total: int
    first: int = 0
    last: int = 0
    every: int = 0

    def __contains__(self, step: int) -> bool:
        at_an_end = step <= self.first or self.total - self.last < step <= self.total
        return at_an_end or (self.every > 0 and step % self.every == 0)

    def count(self, after: int = 0) -> int:
        """Number of dense steps in `after + 1` to `total`."""
        begin, end = max(after, self.first), self.total - self.last
        sparse = max(0, end - begin)
        if sparse and self.every:
            sparse -= end // self.every - begin // self.every
        return self.total - after - sparse

    def describe(self) -> str:
        """For example `the first 5, the last 10 and one in 20: 19 of 100 steps`."""
        ends = {"the first": self.first, "the last": self.last}
        parts = [name if n == 1 else f"{name} {n}" for name, n in ends.items() if n]
        *before, end = [*parts, *([f"one in {self.every}"] if self.every else [])] or ["none"]
        words = f"{', '.join(before)} and {end}" if before else end
        return f"{words}: {self.count()} of {counted(self.total, 'step')}"
