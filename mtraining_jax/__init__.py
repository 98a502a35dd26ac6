"""Train language models with ultra-long contexts in JAX, with dynamic sparse attention."""
