"""Builds tables and pictures from the lines of an evaluation, without a model."""

from mtraining_jax.evaluation.report.write import write_report

__all__ = ["write_report"]
