"""Where the records of a run are written: each kind of writer is one file.

A new one needs its file, a switch in the `metrics` section, and a line in `registry.WRITERS`.
"""

from mtraining_jax.reporting.writers.registry import Writer, open_writers

__all__ = ["Writer", "open_writers"]
