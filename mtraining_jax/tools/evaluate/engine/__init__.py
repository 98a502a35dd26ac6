"""A model for inference: compiled forward passes, prefill and token-by-token decoding."""
