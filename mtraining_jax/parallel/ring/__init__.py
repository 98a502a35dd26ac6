"""Ring attention over the devices that share a sequence.

`topology` defines what each mesh axis does with the keys, `steps` plans and runs one rank's kernel
calls, `transfers` moves keys, values and gradients, and `ring_attention` puts both in order.
"""

from mtraining_jax.parallel.ring.ring_attention import ring_attention
from mtraining_jax.parallel.ring.topology import RINGS, RingTopology, check_ring

__all__ = ["RINGS", "RingTopology", "check_ring", "ring_attention"]
