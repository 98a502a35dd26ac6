"""Sparse patterns: a scorer, a rule and an index, one file each; `options` imports no JAX."""
