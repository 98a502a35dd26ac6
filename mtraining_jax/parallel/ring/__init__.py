"""Ring attention over the devices that share a sequence.

`ring_attention` is the entry point. `topology` defines which ranks meet at which step, `rank_plans`
plans the kernel calls of one rank and `rank_kernels` runs them. `rotate_ring` and `gather_ring`
communicate keys, values and gradients; `columns` fetches key columns.
"""

from mtraining_jax.parallel.ring.ring_attention import ring_attention, ring_plans
from mtraining_jax.parallel.ring.topology import RINGS, RingTopology, check_ring

__all__ = ["RINGS", "RingTopology", "check_ring", "ring_attention", "ring_plans"]
