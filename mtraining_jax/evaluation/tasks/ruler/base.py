"""What RULER's tasks share."""

from dataclasses import dataclass

from mtraining_jax.evaluation.tasks.scoring import share_found
from mtraining_jax.evaluation.tasks.sized import SizedTask
from mtraining_jax.evaluation.tasks.task import Sample


@dataclass(frozen=True, kw_only=True)
class RulerTask(SizedTask):
    """A task with RULER's rule for scores."""

    def score(self, sample: Sample, answer_text: str) -> float:
        """Share of the references that occur in the answer."""
        return share_found(answer_text, sample.references)
