"""Sparse attention: the public API and the attention function of the trainer's layers."""
