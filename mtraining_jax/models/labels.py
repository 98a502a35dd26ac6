"""The label of tokens without a loss."""

IGNORE_LABEL = -100  # as in Hugging Face models
