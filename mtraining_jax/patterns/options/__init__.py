"""Options of sparse patterns: the fields of `[sparsity]`. Imports no JAX."""
