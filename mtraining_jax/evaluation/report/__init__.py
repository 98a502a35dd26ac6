"""From the lines of an evaluation to tables and pictures. Needs no model."""

from mtraining_jax.evaluation.report.write import write_report

__all__ = ["write_report"]
