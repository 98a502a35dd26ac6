"""Language models in Flax NNX, and their Hugging Face checkpoints."""
