"""The XLA backend: blockwise sparse attention on any platform.

A loop with a dynamic trip count iterates over the key blocks of a few query blocks at a time, so
no S x S array exists. Gradients are explicit: JAX does not differentiate the loops.
"""
