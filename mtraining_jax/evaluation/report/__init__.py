"""Builds tables and pictures from the lines of an evaluation, without a model."""

from mtraining_jax.evaluation.report.write import write_report as write_report
from mtraining_jax.evaluation.report.write import write_results as write_results
