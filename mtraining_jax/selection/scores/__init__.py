"""Scores of key blocks and columns."""
