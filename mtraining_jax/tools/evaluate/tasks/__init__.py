"""Tasks that measure what a model can do with its context."""

from mtraining_jax.tools.evaluate.tasks.registry import GROUPS, TASKS, make_tasks, option_docs
from mtraining_jax.tools.evaluate.tasks.task import Document, Sample, Task

__all__ = ["GROUPS", "TASKS", "Document", "Sample", "Task", "make_tasks", "option_docs"]
