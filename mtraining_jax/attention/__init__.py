"""Sparse attention: the public call, the trainer's, and what both share."""
