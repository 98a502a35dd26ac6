"""Text or token files to batches in layout order. Only the loader imports JAX (through Grain)."""
