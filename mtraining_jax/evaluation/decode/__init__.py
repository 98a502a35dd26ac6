"""Text generation: prefill of a prompt, then token-by-token decoding."""
