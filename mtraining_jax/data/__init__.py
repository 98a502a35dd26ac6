"""Data pipeline: text or token files to batches of token ids in layout order.

`source.py` defines the interface of data sources, `sources/` implements them, and `loader.py` makes
batches. Only the loader imports JAX (through Grain).
"""
