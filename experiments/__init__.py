"""Experiments: what training with sparse attention does to a model (README.md)."""
