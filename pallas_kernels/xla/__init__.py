"""The XLA backend: blockwise sparse attention on any platform, without any S x S array."""
