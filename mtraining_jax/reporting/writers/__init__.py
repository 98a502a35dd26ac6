"""Metric writers.

A new writer needs a module, a switch in the `metrics` section and a line in `registry.WRITERS`.
"""

from mtraining_jax.reporting.writers.registry import Writer, open_writers

__all__ = ["Writer", "open_writers"]
