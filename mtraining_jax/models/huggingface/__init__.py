"""Reads and writes Hugging Face checkpoints: config.json (without JAX) and safetensors."""
