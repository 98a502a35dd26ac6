"""Builds tables and pictures from the lines of an evaluation, without a model."""

from mtraining_jax.tools.evaluate.report.write import write_report as write_report
from mtraining_jax.tools.evaluate.report.write import write_results as write_results
