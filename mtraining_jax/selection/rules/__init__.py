"""Rules that turn scores into selected blocks."""
