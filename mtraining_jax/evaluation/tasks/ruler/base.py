"""Base class of RULER's tasks."""

from dataclasses import dataclass

from mtraining_jax.evaluation.tasks.scoring import share_found
from mtraining_jax.evaluation.tasks.sized import SizedTask
from mtraining_jax.evaluation.tasks.task import Sample


@dataclass(frozen=True, kw_only=True)
class RulerTask(SizedTask):
    """A task with RULER's scoring rule."""

    def score(self, sample: Sample, answer_text: str) -> float:
        return share_found(answer_text, sample.references)
