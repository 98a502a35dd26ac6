"""Checks a cluster before a run: `python -m mtraining_jax.check_cluster`."""
