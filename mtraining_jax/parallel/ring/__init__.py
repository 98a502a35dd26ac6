"""Attention over the ring of devices that share a sequence.

`ring_attention` is the public call. `topology` says who meets whom at which step; `rank_plans`
plans what the kernels of one rank compute then, and `rank_kernels` executes it. `turning_ring` and
`gather_ring` move keys, values and gradients; `columns` fetches key columns.
"""

from mtraining_jax.parallel.ring.ring_attention import ring_attention, ring_plans
from mtraining_jax.parallel.ring.topology import RINGS, RingTopology, check_ring

__all__ = ["RINGS", "RingTopology", "check_ring", "ring_attention", "ring_plans"]
