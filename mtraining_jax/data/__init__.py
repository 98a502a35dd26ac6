"""Data: text or token files in, batches of token ids in layout order out.

`source.py` is the interface of a source, `sources/` has one file for each, and `loader.py` makes
batches. Only the loader needs JAX (through Grain), so a configuration can be checked without it.
"""
