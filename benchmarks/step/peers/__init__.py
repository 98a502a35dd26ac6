"""Whole training steps of this library and of what people use otherwise, in one run."""
