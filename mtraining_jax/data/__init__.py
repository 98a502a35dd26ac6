"""Data: text or token files in, batches of token ids in layout order out.

`source.py` says what a source owes, `sources/` has one file for each, `loader.py` makes batches.
Only the loader needs JAX (through Grain), so a configuration can be checked without it.
"""
