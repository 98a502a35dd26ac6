"""Attention over the ring of devices that share a sequence.

`topology` says who meets whom, `shard_tiles` which tiles they compute then; `rank_kernels` calls
the kernels; `turning_ring` and `gather_ring` move keys and values; `columns` fetches key columns.
"""

from mtraining_jax.parallel.ring.ring_attention import SAVED_NAMES, ring_attention
from mtraining_jax.parallel.ring.topology import RINGS, RingTopology, check_ring

__all__ = ["RINGS", "SAVED_NAMES", "RingTopology", "check_ring", "ring_attention"]
