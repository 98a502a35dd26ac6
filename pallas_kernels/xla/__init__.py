"""The XLA backend: blockwise sparse attention on any platform.

Query blocks are processed a few at a time; for each, a loop with a dynamic trip count iterates over
the listed key blocks, so the largest intermediate is one tile per (head, query block) of the chunk
and no S x S array exists. Gradients are explicit: JAX does not differentiate the loops.
"""
