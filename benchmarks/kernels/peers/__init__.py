"""Baselines in torch, each timed in a child process; none of this needs JAX there."""
