"""LoRA (arXiv 2106.09685): adapters as parameters (without JAX), and products with them."""
