"""How a sequence lies on many devices, and attention over the ring that they form."""
